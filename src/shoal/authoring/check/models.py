"""Models of a repository, as the rules see them. Unreadable or malformed files raise no errors.

The second part of this module finds the line numbers of the fields in a ``config.pbtxt``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.authoring.check.findings import Place
from shoal.authoring.environment.embedded import STUB
from shoal.authoring.environment.targets import Target
from shoal.authoring.repository.call_graph import find_circle, is_decoupled, sort_decoupled
from shoal.authoring.repository.config import CONFIG, ModelConfig, as_config
from shoal.authoring.repository.versions import NUMBER, choose_served, sort_versions
from shoal.kit.component.spec import TensorSpec
from shoal.system.files import read_bytes

_MAX_CODE = 4 * 2**20  # bytes of a model.py
MAX_DEPTH = 100  # protobuf's own limit of nesting
ENSEMBLE = "ensemble"
# Platform: backend, as in AutoCompleteBackendFields of core's model_config_utils.cc.
PLATFORMS = {
    "pytorch_libtorch": "pytorch",
    "torch_aoti": "pytorch",
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
# Backends that read inputs and outputs from the model's file, and backends that never do. Other backends may do so if
# the configuration declares none.
_COMPLETE_ALL = ("onnxruntime", "openvino", "tensorflow", "tensorrt")
_COMPLETE_NOTHING = ("fil", "python", "pytorch")
# Imports and base classes through which the model's class may inherit auto_complete_config.
_INHERITS = re.compile(
    r"import\s+\*|import\s(?:(?!import\s)[^#\n])*\bTritonPythonModel\b|class\s+TritonPythonModel\s*\(\s*(?!object\b)\w"
)


@dataclass(frozen=True)
class Model:
    """Model, with its files. ``message`` is the configuration, Triton's ModelConfig; None if it cannot be read.

    ``unreadable`` is the reason why ``config.pbtxt`` could not be read. ``problem`` is the reason why its text could
    not be parsed, and the line. ``broken_line`` is the number of the first line that is not UTF-8, or 0.
    ``is_model_folder`` marks a source for ``shoal compose``, which is not yet in a repository. ``is_fixed``: the server
    takes the configuration as it is, as the embedded Triton does.
    """

    folder: Path
    text: str = ""
    message: Any = None
    is_model_folder: bool = False
    is_fixed: bool = False
    unreadable: str = ""
    problem: tuple[str, int] | None = None
    broken_line: int = 0

    @cached_property
    def fields(self) -> Node:
        """Line numbers of the configuration's fields."""
        return locate(self.text)

    @property
    def path(self) -> Path:
        """Path of ``config.pbtxt``."""
        return self.folder / CONFIG

    @property
    def name(self) -> str:
        """Name that other models call: the folder's name, or with ``is_model_folder`` the name in the configuration."""
        return (self.message.name if self.is_model_folder and self.message else "") or self.folder.name

    @property
    def is_ensemble(self) -> bool:
        """Whether the model is configured as an ensemble."""
        return self.message is not None and (
            ENSEMBLE in (self.message.platform, self.message.backend) or self.message.HasField("ensemble_scheduling")
        )

    @property
    def is_misplatformed(self) -> bool:
        """Whether neither platform nor backend is ``ensemble``."""
        return ENSEMBLE not in (self.message.platform, self.message.backend)

    @property
    def backend(self) -> str:
        """Backend as declared, or as Triton's core derives it from the platform or from ``model.py``."""
        message = self.message
        if message is not None and (message.backend or message.platform):
            return str(message.backend or PLATFORMS.get(message.platform, ""))
        return "python" if any((self.folder / str(v) / "model.py").is_file() for v in self.versions) else ""

    @property
    def is_python(self) -> bool:
        """Whether the backend is ``python``, which runs the model's own ``model.py``."""
        return self.backend == "python"

    @property
    def may_bring_python(self) -> bool:
        """Whether another Python than the server's own may run the model's code: that of an environment or a stub."""
        return "EXECUTION_ENV_PATH" in self.parameters or is_file(self.folder / STUB) or self.is_model_folder

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the version folders, ascending."""
        return sort_versions(self._folders)

    @cached_property
    def misread(self) -> tuple[tuple[str, int], ...]:
        """Folders that Triton mistakes for a version, such as ``2.bak`` for version 2, with that version's number."""
        begun = ((name, re.match(NUMBER, name)) for name in self._folders)
        return tuple((name, int(found[0])) for name, found in begun if found and found[0] != name)

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        return tuple(path.name for path in entries(self.folder) if path.is_dir())

    @property
    def version_folders(self) -> list[Path]:
        """Folders of the versions."""
        return [self.folder / str(version) for version in self.versions]

    @cached_property
    def served_versions(self) -> tuple[int, ...]:
        """Versions that Triton loads by the version policy; by default the latest."""
        return choose_served(self.message, self.versions)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Inputs as declared."""
        return self.config.spec.inputs if self.config is not None else ()

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Outputs as declared."""
        return self.config.spec.outputs if self.config is not None else ()

    @property
    def num_server_inputs(self) -> int:
        """Number of inputs that the server itself supplies, for batches and sequences."""
        sequences = self.message.sequence_batching
        return len(self.message.batch_input) + len(sequences.control_input) + len(sequences.state)

    @property
    def parameters(self) -> Mapping[str, str]:
        """Parameters of the configuration, by name."""
        return self.config.spec.parameters if self.config is not None else {}

    @cached_property
    def is_completed(self) -> bool:
        """Whether Triton may complete the declared inputs and outputs when it loads the model."""
        return not self.is_fixed and self._may_be_completed

    @property
    def is_undeclared(self) -> bool:
        """Whether the configuration leaves inputs or outputs to a server that completes it."""
        is_said = self.message is not None and self.message.input and self.message.output
        return not is_said and not self.is_ensemble and self._may_be_completed

    @cached_property
    def _may_be_completed(self) -> bool:
        if self.is_python and self.sources and (self.message is not None or not self.path.exists()):
            is_said = self.message is not None and self.message.input and self.message.output
            return any("auto_complete_config" in t or (not is_said and _INHERITS.search(t)) for _, t in self.sources)
        if self.message is None or not (self.message.input and self.message.output):
            return True
        if self.is_ensemble or self.backend in _COMPLETE_NOTHING:
            return False
        tensors = (*self.inputs, *self.outputs)
        is_partial = any(not tensor.dims or tensor.dtype == "TYPE_INVALID" for tensor in tensors)
        return is_partial or self.backend in _COMPLETE_ALL

    @cached_property
    def config(self) -> ModelConfig | None:
        """Configuration in the form that the rest of shoal uses; None if it cannot be read."""
        return as_config(self.message, self.folder) if self.message is not None else None

    @cached_property
    def sources(self) -> tuple[tuple[Path, str], ...]:
        """Path and text of each version's ``model.py``; bytes that are not UTF-8 become U+FFFD."""
        found = []
        for version in self.versions:
            path = self.folder / str(version) / "model.py"
            with suppress(OSError):  # missing, a file of another user, or not a file
                found.append((path, read_bytes(path, _MAX_CODE).decode("utf-8", "replace")))
        return tuple(found)

    def at(self, *path: str | int) -> Place:
        """Return the place of the configuration's field at ``path``, such as ``"input", 1, "dims"``."""
        return Place(self.path, self.fields.find(*path).line)

    def at_entry(self, *path: str | int, key: str, within: tuple[str | int, ...] = ()) -> Place:
        """Return the place of the entry ``key`` in the map field at ``path``, or of a field ``within`` that entry."""
        around = self.fields.find(*path[:-1])
        return Place(self.path, next(around.entries(str(path[-1]), key), around).find(*within).line)


@dataclass(frozen=True)
class Repository:
    """Models to check. ``models`` are the models to report on, ``known`` all models that they may call, by name.

    ``target`` is the Triton that will serve the repository, or None if unknown. ``manifest`` is the content of the
    ``manifest.json`` that ``shoal compose`` wrote, or empty.
    """

    root: Path
    models: tuple[Model, ...]
    known: Mapping[str, Model]
    target: Target | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def configs(self) -> Mapping[str, ModelConfig]:
        """Configurations of the known models that can be read, by the model's name."""
        return {name: model.config for name, model in self.known.items() if model.config is not None}

    @cached_property
    def order(self) -> Mapping[str, bool]:
        """Names of the models after those that their steps call, and whether a request to them may get several answers.

        Ensembles in a circle, and those that call one, are left out.
        """
        return sort_decoupled(self.configs)

    def find_circle(self, name: str) -> list[str]:
        """Find a chain of steps from an ensemble back to itself; return the chain's model names, or an empty list."""
        return [] if name in self.order else find_circle(name, self.configs)

    @cached_property
    def unreadable_ensembles(self) -> tuple[str, ...]:
        """Texts of the configurations of ensembles that cannot be parsed."""
        texts = (model.text for model in self.known.values() if model.message is None)
        return tuple(text for text in texts if "ensemble" in text)

    def is_decoupled(self, name: str) -> bool:
        """Whether a request may get several answers: the model is decoupled, or an ensemble with a decoupled step."""
        if name in self.order:
            return self.order[name]
        return name in self.configs and is_decoupled(self.configs[name], self.configs.get)


def entries(folder: Path) -> list[Path]:
    """Return the paths in ``folder``, sorted by name; an empty list if the folder cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; False if the name is too long or the folder cannot be read."""
    try:
        return path.is_file()
    except OSError:
        return False


def exists(path: Path) -> bool:
    """Whether ``path`` exists; False if the name is too long or the folder cannot be read."""
    try:
        return path.exists()
    except OSError:
        return False


def enum_name(enum: Any, number: int) -> str:
    """Return the name of an enum's value, or the number as a text if the enum does not define that value."""
    return str(dict(map(reversed, enum.items())).get(number, number))


# --- lines of fields --------------------------------------------------------------------------------------------------
# protobuf reads the message itself, but keeps no positions. This walks the same tokens, with protobuf's own tokenizer,
# and keeps only the positions.


@dataclass
class Node:
    """Field of a configuration: its line, its value if it is a scalar, and lists of the fields within it, by name."""

    line: int
    value: str = ""
    children: dict[str, list[Node]] = field(default_factory=dict)

    def find(self, *path: str | int) -> Node:
        """Find the field at ``path``, such as ``"input", 1, "dims"``; if absent, the innermost field around it.

        An index follows a name and counts the fields with that name, from 0. A name without an index means the first.
        """
        node, position = self, 0
        while position < len(path):
            name = path[position]
            index = path[position + 1] if position + 1 < len(path) and isinstance(path[position + 1], int) else None
            position += 1 if index is None else 2
            same = node.children.get(str(name), [])
            if not same or int(index or 0) >= len(same):
                return node
            node = same[int(index or 0)]
        return node

    def entries(self, name: str, key: str) -> Iterator[Node]:
        """Return the entries of the map field ``name`` that have ``key``."""
        keys = ((entry, entry.children.get("key")) for entry in self.children.get(name, []))
        return (entry for entry, found in keys if found and found[0].value == key)


def locate(text: str) -> Node:
    """Read the fields of a ``config.pbtxt``; if it is malformed, only the fields before the first syntax error."""
    from google.protobuf.text_format import ParseError, Tokenizer

    root = Node(1)
    with suppress(ParseError), warnings.catch_warnings():  # text_format.Parse reports the error
        warnings.simplefilter("ignore", DeprecationWarning)
        _read_fields(Tokenizer(text.split("\n")), root, "", 0)
    return root


def _read_fields(tokens: Any, node: Node, end: str, depth: int) -> None:
    while not tokens.AtEnd() and not (end and tokens.TryConsume(end)):
        line = _line(tokens)
        name = str(tokens.ConsumeIdentifierOrNumber())
        _read_value(tokens, node, name, line, depth)
        if not tokens.TryConsume(","):
            tokens.TryConsume(";")


def _read_value(tokens: Any, node: Node, name: str, line: int, depth: int) -> None:
    tokens.TryConsume(":")
    if not tokens.TryConsume("["):
        _read_one(tokens, node, name, line, depth)
        return
    while not tokens.TryConsume("]"):
        _read_one(tokens, node, name, _line(tokens), depth)
        if not tokens.TryConsume(",") and not tokens.LookingAt("]"):
            raise tokens.ParseError("Expected ',' or ']'.")


def _read_one(tokens: Any, node: Node, name: str, line: int, depth: int) -> None:
    if depth > MAX_DEPTH or tokens.AtEnd():
        raise tokens.ParseError("Nested too deep, or cut short.")
    child = Node(line)
    node.children.setdefault(name, []).append(child)
    for start, end in (("{", "}"), ("<", ">")):
        if tokens.TryConsume(start):
            _read_fields(tokens, child, end, depth + 1)
            return
    if tokens.token[:1] in ('"', "'"):
        child.value = str(tokens.ConsumeString())
        return
    if tokens.TryConsume("-"):
        child.value = "-"
    child.value += str(tokens.token)
    tokens.NextToken()


def _line(tokens: Any) -> int:
    return int(tokens._line) + 1  # the tokenizer has no public attribute for it
