"""Reusable pre- and post-processing components for NVIDIA Triton, and the tools that make served pipelines of them."""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.authoring.check.families import check as check
    from shoal.authoring.check.findings import Finding as Finding
    from shoal.authoring.check.findings import Severity as Severity
    from shoal.authoring.composition.compose import compose as compose
    from shoal.authoring.composition.ensemble import Ensemble as Ensemble
    from shoal.authoring.project.importing.add_model import add_model as add_model
    from shoal.authoring.repository.config import ModelConfig as ModelConfig
    from shoal.authoring.repository.config import read_config as read_config
    from shoal.authoring.repository.config import write_config as write_config
    from shoal.clients.client.aio import AsyncClient as AsyncClient
    from shoal.clients.client.calls import Answer as Answer
    from shoal.clients.client.client import Client as Client
    from shoal.clients.llm.client import AsyncLlm as AsyncLlm
    from shoal.clients.llm.client import Llm as Llm
    from shoal.clients.local import Pipeline as Pipeline
    from shoal.clients.local import load as load
    from shoal.errors import ArtifactError as ArtifactError
    from shoal.errors import InputError as InputError
    from shoal.errors import ServerError as ServerError
    from shoal.errors import SetupError as SetupError
    from shoal.errors import ShoalError as ShoalError
    from shoal.kit.blocks import Choices as Choices
    from shoal.kit.blocks import blend as blend
    from shoal.kit.blocks import check_finite as check_finite
    from shoal.kit.blocks import check_numbers as check_numbers
    from shoal.kit.blocks import check_weight as check_weight
    from shoal.kit.blocks import normalise as normalise
    from shoal.kit.blocks import read_zscore as read_zscore
    from shoal.kit.component.base import Component as Component
    from shoal.kit.component.context import Context as Context
    from shoal.kit.component.files import check_file as check_file
    from shoal.kit.component.files import read_json as read_json
    from shoal.kit.component.files import read_object as read_object
    from shoal.kit.component.files import read_text as read_text
    from shoal.kit.component.ledger import SETUP as SETUP
    from shoal.kit.component.parameters import Parameters as Parameters
    from shoal.kit.component.parameters import fixed_by as fixed_by
    from shoal.kit.component.spec import Array as Array
    from shoal.kit.component.spec import Arrays as Arrays
    from shoal.kit.component.stream import Stream as Stream
    from shoal.kit.component.streaming import StreamingComponent as StreamingComponent
    from shoal.kit.component.tensors import Device as Device
    from shoal.kit.component.tensors import namespace as namespace
    from shoal.kit.generation.completions import Completions as Completions
    from shoal.kit.generation.contract import TokenRequest as TokenRequest
    from shoal.kit.generation.contract import read_streaming as read_streaming
    from shoal.kit.generation.pieces import Piece as Piece
    from shoal.kit.generation.prompts import Prompts as Prompts
    from shoal.kit.generation.sampling import Sampling as Sampling
    from shoal.kit.generation.trtllm import Postprocessing as Postprocessing
    from shoal.kit.generation.trtllm import Preprocessing as Preprocessing
    from shoal.kit.generation.weights import find_weights as find_weights
    from shoal.kit.images import make_image_reader as make_image_reader
    from shoal.kit.text.tokenizer_files import read_tokenizer as read_tokenizer
    from shoal.kit.text.tokens import WordPiece as WordPiece
    from shoal.kit.text.tokens import check_texts as check_texts
    from shoal.kit.text.tokens import decode_texts as decode_texts
    from shoal.kit.text.tokens import make_encoder as make_encoder
    from shoal.kit.text.tokens import make_pair_encoder as make_pair_encoder
    from shoal.kit.text.tokens import read_vocabulary as read_vocabulary
    from shoal.kit.text.words import WORD_VALUES as WORD_VALUES
    from shoal.kit.text.words import WordCounts as WordCounts
    from shoal.kit.text.words import read_words as read_words
    from shoal.serving.server.launch import serve as serve

__version__ = "0.1.0"


def read_homes(file: str) -> dict[str, str]:
    """Read from ``file``, a package's ``__init__.py``, its public names, each with the module that defines the name."""
    found = ast.parse(Path(file).read_text(encoding="utf-8"))
    typed = [node for block in found.body if isinstance(block, ast.If) for node in block.body]
    return {node.names[0].name: str(node.module) for node in typed if isinstance(node, ast.ImportFrom)}


def face(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported on first use.

    The names are those that ``file``, the package's ``__init__.py``, imports for type checkers: ``from HOME import NAME
    as NAME``. This keeps `import shoal` fast. It also lets the copy of shoal beside a model.py hold only the modules
    that this model.py imports.
    """
    homes = read_homes(file)

    def look_up(name: str) -> Any:
        if name in homes:
            return getattr(import_module(homes[name]), name)
        from difflib import get_close_matches

        near = "".join(f". Did you mean {each}?" for each in get_close_matches(name, homes, 1))
        raise AttributeError(f"module {package!r} has no attribute {name!r}{near}")

    return look_up, lambda: sorted(homes), list(homes)


__getattr__, __dir__, __all__ = face(__name__, __file__)
