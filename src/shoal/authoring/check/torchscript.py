"""Rules for TorchScript models: the declared tensors must fit what the model's ``forward`` takes and returns.

An archive's code is read as text: no code is run, and no weight is read.
"""

from __future__ import annotations

import ast
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.environment.targets import Target
from shoal.kit.component.files import describe_bytes
from shoal.system.files import open_regular

BACKEND = "pytorch"
FILE = "model.pt"
_MAX_SHOWN = 120  # characters of a line of code in a message
_MAX_TEXT = 4 * 2**20  # bytes per file of code
_ROOT = "__torch__"
# Code as torch writes it: a call that names a device, or an attribute that holds one.
_DEVICE = re.compile(r"(?<![\w.])torch\.(device|cuda|cpu)\(|^\s+\w+ : (Device|Optional\[Device\])\s*$")
_DEFAULT = re.compile(r": (Device|Optional\[Device\])=torch\.device\([^)]*\)")
# Errors of zipfile for damaged archives; RuntimeError means encrypted, or compressed in an unknown way.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError, LookupError)

FOREIGN = Rule("torchscript-foreign", Severity.ERROR)
INPUTS = Rule("torchscript-inputs", Severity.ERROR)
NAMES = Rule("torchscript-names", Severity.ERROR)
OUTPUTS = Rule("torchscript-outputs", Severity.ERROR)
DEVICE = Rule("torchscript-device", Severity.ERROR)
BOUND = Rule("torchscript-bound", Severity.WARNING)
DTYPE = Rule("torchscript-dtype", Severity.ERROR)

_INDEX = re.compile(r"(?:(?!__).)*__([0-9]{1,6})")  # the first "__", as libtorch.cc looks for it


def find(model: Model, repository: Repository) -> Findings:
    """Find differences between a model of the PyTorch backend and its configuration."""
    if model.message is None or model.backend != BACKEND or model.is_model_folder:
        return
    is_native = _is_native(model, repository.target)
    name = model.message.default_model_filename or FILE
    if not name.endswith(".pt") or model.message.platform == "torch_aoti":
        return
    yield from _find_names(model, is_native=is_native)
    for version in model.served_versions:
        folder = model.folder / str(version)
        if not (folder / "model.py").is_file():  # else NVIDIA's Python runtime, where model.pt holds weights
            yield from _find_file(model, folder / name, repository, is_native=is_native)


def _is_native(model: Model, target: Target | None) -> bool:
    """Whether NVIDIA's C++ backend serves the model."""
    return not model.message.runtime.endswith(".py") and not (target and target.is_embedded)


def _find_file(model: Model, path: Path, repository: Repository, *, is_native: bool) -> Findings:
    try:
        if not path.is_file():
            return  # another rule reports a missing file
        script = Script(path)
    except ForeignError as error:
        yield FOREIGN.at(Place(path), f"It is not a TorchScript archive: {error}.", "Save it with torch.jit.save.")
        return
    except OSError as error:
        yield FOREIGN.at(Place(path), f"It cannot be read: {error.strerror}.", "Let the server's user read it.")
        return
    with closing(script):
        yield from _find_devices(model, path, script)
        owner = script.find_class(script.main) if script.main else None
        if owner is not None and not is_native:
            yield from _find_dtype(model, owner)
        forward = find_method(owner, "forward") if owner else None
        if owner is None or forward is None:
            return
        taken = list(arguments(forward))
        is_dict = len(taken) == 1 and taken[0][1].startswith("Dict[")
        if not is_dict:
            yield from _find_inputs(model, taken, is_native=is_native)
            yield from _find_order(model, [name for name, _, _ in taken], is_native=is_native)
        yield from _find_outputs(model, *returned(forward), repository=repository, is_native=is_native)


def _find_devices(model: Model, path: Path, script: Script) -> Findings:
    groups = model.message.instance_group
    found = list(script.devices())
    if not found or any(group.kind == group.KIND_MODEL for group in groups):
        return
    places = [(_is_elsewhere(text, groups), name, line, text) for name, line, text in found]
    is_elsewhere, name, line, text = max(
        places, key=lambda place: place[0]
    )  # the first place with the wrong device, else the first
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    yield (DEVICE if is_elsewhere else BOUND).at(
        Place(path, line),
        f"Line {line} of {name} names a device{more}: {text[:_MAX_SHOWN]}",
        "Add the file with shoal add-model, which takes the device out of its code; shoal train writes encoders for"
        " every device. Or make tensors with device=x.device, and save it with torch.jit.script.",
    )


def _is_elsewhere(text: str, groups: Any) -> bool:
    """Whether a line of TorchScript names a device on which some instance of these instance groups does not run."""
    named = re.search(r"""torch\.(?:device\(["'])?(cpu|cuda)(?::([0-9]+))?""", text)
    if not named:
        return False
    if named[1] == "cpu":
        return any(group.kind == group.KIND_GPU for group in groups)
    is_other = named[2] is not None and any(int(named[2]) != gpu for group in groups for gpu in group.gpus)
    return is_other or any(group.kind == group.KIND_CPU for group in groups)


def _find_dtype(model: Model, owner: ast.ClassDef) -> Findings:
    """Find a ``dtype`` to which shoal's backend cannot convert the module whose class is ``owner``."""
    dtype = model.parameters.get("dtype", "fp32")
    if dtype != "fp32" and not (dtype in ("bf16", "fp16") and has_trunk(owner)):
        yield DTYPE.at(
            model.at_entry("parameters", key="dtype", within=("value", "string_value")),
            f"{FILE} of {model.name} cannot run in dtype {dtype}: bf16 and fp16 convert a submodule `trunk`, and"
            f" {'it has none' if not has_trunk(owner) else 'this is neither'}.",
            "Write fp32, or compose without --dtype. In a model of your own, call the part to convert `trunk`.",
        )


def has_trunk(owner: ast.ClassDef) -> bool:
    """Whether a class in a TorchScript archive declares a submodule ``trunk``."""
    declared = [statement.target for statement in owner.body if isinstance(statement, ast.AnnAssign)]
    return any(isinstance(target, ast.Name) and target.id == "trunk" for target in declared)


def _find_inputs(model: Model, taken: list[tuple[str, str, bool]], *, is_native: bool) -> Findings:
    if not taken or not model.inputs:
        return
    shown = ", ".join(f"{name}: {kind}" for name, kind, _ in taken)
    num_given = len(model.inputs) + model.num_server_inputs
    least = len(taken) if is_native else sum(not has_default for _, _, has_default in taken)
    if not least <= num_given <= len(taken):
        most = str(least) if least == len(taken) else f"{least} to {len(taken)}"
        what = f"Declared inputs: {num_given}; forward({shown}) takes {most}."
        yield INPUTS.at(model.at("input"), what, "Declare one for each argument, in their order.")
    elif is_native:
        for name, kind, _ in taken:
            if kind != "Tensor" and not kind.startswith("List["):
                what = f"forward({shown}): the native backend cannot pass a {kind}."
                yield INPUTS.at(model.at("input"), what, f"Wrap the module in one whose {name} is a Tensor.")


def _find_names(model: Model, *, is_native: bool) -> Findings:
    """Find names such as ``INPUT__2`` whose indices leave a gap, or contradict the order of the declarations."""
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        found = [_INDEX.fullmatch(tensor.name) for tensor in tensors]
        indices = [int(match[1]) for match in found if match]
        if not tensors or len(indices) < len(tensors) or (kind == "input" and model.num_server_inputs):
            continue
        shown = ", ".join(tensor.name for tensor in tensors)
        wanted = list(range(len(indices)))
        fix = f"Count the names' indices from 0: {', '.join(_with_index(t.name, i) for i, t in enumerate(tensors))}."
        is_gapless = sorted(indices) == wanted if kind == "input" else len(set(indices)) == len(indices)
        if not is_gapless:
            yield NAMES.at(model.at(kind, 0, "name"), f"The {kind}s {shown} leave or repeat an index.", fix)
        elif not is_native and indices != wanted and kind == "input":
            what = f"{shown}: a backend in Python uses the order of the list, not the indices in the names."
            yield NAMES.at(model.at(kind, 0, "name"), what, "List them in the order of their indices.")


def _with_index(name: str, index: int) -> str:
    return f"{name.partition('__')[0]}__{index}"


def _find_order(model: Model, taken: list[str], *, is_native: bool) -> Findings:
    """Find an input that the backend passes by position, but that has the name of another argument of ``forward``."""
    names = [tensor.name for tensor in model.inputs]
    is_by_name = is_native and set(names) <= set(taken)
    is_by_index = is_native and all(_INDEX.fullmatch(name) for name in names)
    if is_by_name or is_by_index or len(names) > len(taken):
        return
    for index, name in enumerate(names):
        if name in taken and taken.index(name) != index:
            what = f"{name} is forward's argument {taken.index(name)}, but gets input {index}: the order counts."
            yield NAMES.at(
                model.at("input", index, "name"), what, f"List the inputs in forward's order: {', '.join(taken)}."
            )
            return


def _find_outputs(model: Model, kind: str, num: int | None, *, repository: Repository, is_native: bool) -> Findings:
    if not model.outputs:
        return
    place, num_declared = model.at("output"), len(model.outputs)
    if kind.startswith("Dict[") or (kind == "List[Tensor]" and is_native):
        what = f"forward returns a {kind}, not a tensor or a tuple of tensors."
        yield OUTPUTS.at(place, what, "Return a tuple; in transformers, with torchscript=True or return_dict=False.")
        return
    if num is None:
        return
    most = max((int(m[1]) + 1 for t in model.outputs if (m := _INDEX.fullmatch(t.name))), default=0)
    is_by_index = is_native and all(_INDEX.fullmatch(tensor.name) for tensor in model.outputs)
    needed = max(num_declared, most) if is_by_index else num_declared
    if needed > num:
        what = f"Declared outputs: {num_declared}, up to number {needed - 1}; forward returns {num}, counted from 0."
        yield OUTPUTS.at(place, what, f"Declare {num}, counted from 0.")
    elif num_declared < num and repository.manifest and not is_native:
        what = f"Declared outputs: {num_declared}; forward returns {num}, and shoal's backend requires all of them."
        yield OUTPUTS.at(place, what, f"Declare {num}.")


# --- the archive ------------------------------------------------------------------------------------------------------


class ForeignError(ValueError):
    """Error for a file that is not a TorchScript archive; its message is a clause, such as "it is empty"."""


class Script:
    """Reader of a TorchScript archive.

    Raises:
        ForeignError: the file is not a TorchScript archive.
    """

    def __init__(self, path: Path) -> None:
        begins = b""
        try:
            with open_regular(path) as file:
                begins = file.read(32) or b""  # None from a file of /proc that waits
            self._zip = zipfile.ZipFile(path)
        except _DAMAGE as error:
            why = "" if begins.startswith(b"PK") else describe_bytes(begins) if begins else "it is empty"
            raise ForeignError(why or f"it is cut off or damaged: {error}") from error
        names = self._zip.namelist()
        # Written by torch before 1.4; its code is not read.
        is_old = any(name.count("/") == 1 and name.endswith("/model.json") for name in names)
        self._data = next((name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")), "")
        self._root = self._data.rpartition("/")[0]
        has_code = any(name.startswith(f"{self._root}/code/") for name in names)
        if self._data and not has_code:
            self.close()
            raise ForeignError("it contains weights and no code: it was saved with torch.save, not torch.jit.save")
        if any(name.endswith("/archive_format") for name in names):
            self.close()
            raise ForeignError("it is a PT2 archive of torch.export or AOTInductor, not of torch.jit.save")
        if not self._data and not is_old:
            self.close()
            raise ForeignError("it is another zip archive")

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    @cached_property
    def main(self) -> str:
        """Qualified class name of the archive's root module; empty if unknown."""
        try:
            for opcode, argument, _ in pickletools.genops(self._read(self._data, 2**16)):
                if opcode.name == "GLOBAL":
                    name = str(argument).replace(" ", ".")
                    return name if name.split(".")[0] == _ROOT else ""
        except _DAMAGE:
            pass
        return ""

    def find_class(self, name: str) -> ast.ClassDef | None:
        """Return the syntax tree of the class with the qualified ``name``; None if it cannot be read."""
        module, _, last = name.rpartition(".")
        if module.split(".")[0] != _ROOT:
            return None
        try:
            tree = ast.parse(self._read(f"{self._root}/code/{module.replace('.', '/')}.py", _MAX_TEXT).decode())
        except (*_DAMAGE, SyntaxError, RecursionError, MemoryError):
            return None
        classes = (statement for statement in tree.body if isinstance(statement, ast.ClassDef))
        return next((found for found in classes if found.name == last), None)

    def devices(self) -> Iterator[tuple[str, int, str]]:
        """Yield each place where the code names a device: file in the archive, line number, and text of the line.

        Defaults of arguments do not count, because callers in the same file usually pass another device.
        """
        for name in self._zip.namelist():
            if not name.startswith(f"{self._root}/code/") or not name.endswith(".py"):
                continue
            with suppress(*_DAMAGE):
                for number, line in enumerate(self._read(name, _MAX_TEXT).decode().splitlines(), start=1):
                    if _DEVICE.search(_DEFAULT.sub("", line)):
                        yield name.partition("/")[2], number, line.strip()

    def _read(self, name: str, most: int) -> bytes:
        with self._zip.open(name) as file:
            return file.read(most)


def find_method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return the syntax tree of a class's method ``name``; None if the class has no such method."""
    return next((s for s in owner.body if isinstance(s, ast.FunctionDef) and s.name == name), None)


def arguments(function: ast.FunctionDef) -> Iterator[tuple[str, str, bool]]:
    """Yield each argument of a method after ``self``: its name, its type as written, and whether it has a default."""
    given = [*function.args.posonlyargs, *function.args.args]
    first_default = len(given) - len(function.args.defaults)
    for index, argument in enumerate(given[1:], start=1):
        kind = ast.unparse(argument.annotation) if argument.annotation else "Tensor"
        yield argument.arg, kind, index >= first_default


def returned(function: ast.FunctionDef) -> tuple[str, int | None]:
    """Return a function's return type, and the number of returned values: None unless the type is Tensor or Tuple."""
    kind = function.returns
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Tuple":
        return "Tuple", len(kind.slice.elts) if isinstance(kind.slice, ast.Tuple) else 1
    name = ast.unparse(kind) if kind else ""
    return name, 1 if name == "Tensor" else None
