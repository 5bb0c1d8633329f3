"""The inside of a model's process: the class a ``model.py`` derives from, and what it is given."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.component.artifact_files import check_file as check_file
    from shoal.component.artifact_files import read_json as read_json
    from shoal.component.artifact_files import read_object as read_object
    from shoal.component.artifact_files import read_text as read_text
    from shoal.component.artifact_files import refusal as refusal
    from shoal.component.base import Component as Component
    from shoal.component.base import Context as Context
    from shoal.component.ledger import SETUP as SETUP
    from shoal.component.parameters import Settings as Settings
    from shoal.component.parameters import mended_by as mended_by
    from shoal.component.tensors import Array as Array
    from shoal.component.tensors import Arrays as Arrays
    from shoal.component.tensors import Device as Device
    from shoal.component.tensors import namespace as namespace
    from shoal.errors import ArtifactError as ArtifactError
    from shoal.errors import InputError as InputError
    from shoal.errors import SetupError as SetupError

HOMES = {
    "Array": "shoal.component.tensors",
    "Arrays": "shoal.component.tensors",
    "ArtifactError": "shoal.errors",
    "check_file": "shoal.component.artifact_files",
    "Component": "shoal.component.base",
    "Context": "shoal.component.base",
    "Device": "shoal.component.tensors",
    "InputError": "shoal.errors",
    "mended_by": "shoal.component.parameters",
    "namespace": "shoal.component.tensors",
    "read_json": "shoal.component.artifact_files",
    "read_object": "shoal.component.artifact_files",
    "read_text": "shoal.component.artifact_files",
    "refusal": "shoal.component.artifact_files",
    "Settings": "shoal.component.parameters",
    "SETUP": "shoal.component.ledger",
    "SetupError": "shoal.errors",
}
__all__ = [*HOMES]
__getattr__, __dir__ = face(__name__, HOMES)
