"""The code in a TorchScript archive, read as text: no code is run, and no weight is read."""

from __future__ import annotations

import ast
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from shoal.component.artifact_files import describe_bytes

_MAX_TEXT = 4 * 2**20  # of one file of code
_ROOT = "__torch__"
# torch writes the code, in one form: a call that names a device, or an attribute that holds one.
_DEVICE = re.compile(r"(?<![\w.])torch\.(device|cuda|cpu)\(|^\s+\w+ : (Device|Optional\[Device\])\s*$")
_DEFAULT = re.compile(r": (Device|Optional\[Device\])=torch\.device\([^)]*\)")
# What zipfile raises over damaged archives; RuntimeError: they seem encrypted, or compressed in an unknown way.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError, LookupError)


class ForeignError(ValueError):
    """A file is not a TorchScript archive; the message says why, as the end of a sentence."""


class Script:
    """A TorchScript archive.

    Raises:
        ForeignError: the file is not a TorchScript archive.
    """

    def __init__(self, path: Path) -> None:
        begins = b""
        try:
            with path.open("rb") as file:
                begins = file.read(32)
            self._zip = zipfile.ZipFile(path)
        except _DAMAGE as error:
            why = "" if begins.startswith(b"PK") else describe_bytes(begins) if begins else "it is empty"
            raise ForeignError(why or f"it is cut off or damaged: {error}") from error
        names = self._zip.namelist()
        self.is_old = any(name.endswith("/model.json") for name in names)  # of torch before 1.4: not read here
        self._data = next((name for name in names if name.count("/") == 1 and name.endswith("/data.pkl")), "")
        self._root = self._data.rpartition("/")[0]
        has_code = any(name.startswith(f"{self._root}/code/") for name in names)
        if self._data and not has_code:
            self.close()
            raise ForeignError("it contains weights and no code: it was saved with torch.save, not torch.jit.save")
        if not self._data and not self.is_old:
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
        """The class of a qualified name."""
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
        """Each place where the code names a device: its file in the archive, the line, and the text there.

        Defaults of arguments are left out: callers in the same file mostly give another device.
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
    """A method of a class."""
    return next((s for s in owner.body if isinstance(s, ast.FunctionDef) and s.name == name), None)


def arguments(function: ast.FunctionDef) -> Iterator[tuple[str, str, bool]]:
    """The arguments behind self: name, type as it is written, and whether there is a default."""
    given = [*function.args.posonlyargs, *function.args.args]
    first_default = len(given) - len(function.args.defaults)
    for index, argument in enumerate(given[1:], start=1):
        kind = ast.unparse(argument.annotation) if argument.annotation else "Tensor"
        yield argument.arg, kind, index >= first_default


def returned(function: ast.FunctionDef) -> tuple[str, int | None]:
    """Return a function's return type as written, and its number of values; None unless it is a tensor or a tuple."""
    kind = function.returns
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Tuple":
        return "Tuple", len(kind.slice.elts) if isinstance(kind.slice, ast.Tuple) else 1
    name = ast.unparse(kind) if kind else ""
    return name, 1 if name == "Tensor" else None
