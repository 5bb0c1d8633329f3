"""Component API: base class for a ``model.py``, and access to the component's arrays, parameters and artifacts."""

from typing import TYPE_CHECKING

from shoal import face

if TYPE_CHECKING:
    from shoal.component.artifact_files import check_file as check_file
    from shoal.component.artifact_files import read_json as read_json
    from shoal.component.artifact_files import read_object as read_object
    from shoal.component.artifact_files import read_text as read_text
    from shoal.component.artifact_files import read_tokenizer as read_tokenizer
    from shoal.component.artifact_files import refusal as refusal
    from shoal.component.base import Component as Component
    from shoal.component.context import Context as Context
    from shoal.component.ledger import SETUP as SETUP
    from shoal.component.parameters import Parameters as Parameters
    from shoal.component.parameters import fixed_by as fixed_by
    from shoal.component.streaming import Stream as Stream
    from shoal.component.streaming import StreamingComponent as StreamingComponent
    from shoal.component.tensors import Array as Array
    from shoal.component.tensors import Arrays as Arrays
    from shoal.component.tensors import Device as Device
    from shoal.component.tensors import namespace as namespace
    from shoal.errors import ArtifactError as ArtifactError
    from shoal.errors import InputError as InputError
    from shoal.errors import SetupError as SetupError

__getattr__, __dir__, __all__ = face(__name__, __file__)
