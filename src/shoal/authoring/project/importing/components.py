"""Import of a component from a Python file of the user's. The file is run, since only that finds its classes."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.authoring.composition.writing import version_files
from shoal.authoring.project.importing.imported import Imported, split_source
from shoal.authoring.project.scaffold.names import parse_tensor
from shoal.authoring.project.scaffold.skeletons import draft_component
from shoal.authoring.repository.config import CONFIG, read_config
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.base import Component
from shoal.kit.component.hosted import load_module
from shoal.kit.component.spec import TensorSpec
from shoal.kit.component.streaming import StreamingComponent

_HEAD = "import os, sys\n\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\n\n"
_DERIVE = "Derive a class from shoal's Component, and write its run(self, batch)."
_DECLARE = 'Declare them in the class, as NAME:DTYPE:DIMS: inputs = ["TEXT:STRING:1"]; outputs = ["LENGTH:FP32:1"]'


def list_files(path: Path) -> list[Path]:
    """Return the files of a component: those of its model folder, or its file and the modules beside it that it uses.

    A model folder is recognised by its ``config.pbtxt``, one folder above ``model.py``. The code is not run.
    """
    if folder := _find_model_folder(path):
        return [folder / CONFIG, *version_files(folder)]
    found, waiting = {path}, [path]
    while waiting:
        with suppress(SyntaxError, ValueError, OSError):  # where it is run, the error is reported
            for node in ast.walk(ast.parse(waiting.pop().read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                places = [path.parent / name.partition(".")[0] for name in names if name.partition(".")[0] != "shoal"]
                beside = [each for place in places for each in (place.with_suffix(".py"), *place.rglob("*.py"))]
                new = {each for each in beside if each.is_file()} - found
                found |= new
                waiting += new
    return sorted(found)


def draft_own_component(source: Path | str, name: str, *, scratch: Path) -> Imported:
    """Draft a model folder from ``FILE.py:CLASS``, a class derived from ``Component``; the file is run.

    Without ``:CLASS``, the file has exactly one component. Modules beside the file that it imports are copied too. The
    tensors are those of the ``config.pbtxt`` of the model folder in which the file is ``1/model.py``, which is then
    copied as a whole; otherwise the class declares them: ``inputs`` and ``outputs``, lists of ``NAME:DTYPE:DIMS``.

    Raises:
        InputError: there is no such class, it is not a component, lacks ``run``, or does not declare its tensors.
        ArtifactError: the file cannot be run, or its model folder's configuration not be read.
    """
    path, _ = split_source(source)
    module, found = find_component(source)
    if folder := _find_model_folder(path):
        message = read_config(folder).message
        message.name = name
        files = {str(each.relative_to(folder)): each for each in version_files(folder)}
        return Imported(message, files, (f"The model folder {folder}, as it is",))
    inputs, outputs = (_read_tensors(found, side, path) for side in ("inputs", "outputs"))
    made = draft_component(name, inputs=inputs, outputs=outputs, project=scratch, is_streaming=found.is_decoupled)
    made.draft.write()
    message = read_config(scratch / "preprocess" / name).message
    copied = {f"1/{each.relative_to(path.parent)}": each for each in list_files(path) if each != path}
    exported = getattr(getattr(module, "TritonPythonModel", None), "component_class", None)
    code = _write_code(path, found, is_exported=exported is found)
    return Imported(message, {**copied, "1/model.py": code}, (f"The component {found.__name__} of {path.name}",))


def find_component(source: Path | str) -> tuple[ModuleType, type[Component]]:
    """Return the module and the class of ``FILE.py:CLASS``, or of ``FILE.py`` with one component; the file is run.

    Raises:
        InputError: there is no such class, it is not a component, or lacks ``run``.
        ArtifactError: the file cannot be run.
    """
    path, wanted = split_source(source)
    module = _run(path)
    return module, _find_class(module, path, wanted)


def _find_model_folder(path: Path) -> Path | None:
    folder = path.resolve().parent.parent
    return folder if path.name == "model.py" and (folder / CONFIG).is_file() else None


def _run(path: Path) -> ModuleType:
    """Run a file of the user's as a module, with the modules beside it."""
    before = list(sys.path)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return load_module(path)
    except (Exception, SystemExit) as error:
        files = {str(each) for file in list_files(path) for each in (file, file.resolve())}
        places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        places += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
        file, line = next((each for each in reversed(places) if each[0] in files), (path, 1))
        what = error.msg if isinstance(error, SyntaxError) else error
        raise ArtifactError(
            f"{os.path.relpath(file)}:{line}: {type(error).__name__}: {what}.",
            "Correct that line; or install what it imports, in the environment of this command.",
        ) from None
    finally:
        sys.path[:] = before


def _find_class(module: ModuleType, path: Path, wanted: str) -> type[Component]:
    """Return the component called ``wanted``, or the only one that the file defines."""
    classes = {name: each for name, each in vars(module).items() if isinstance(each, type)}
    known = {name: each for name, each in classes.items() if issubclass(each, Component)}
    own = [name for name, each in known.items() if each.__module__ == module.__name__]
    fix = f"Its components: {', '.join(f'{path}:{name}' for name in own)}" if own else _DERIVE
    if wanted and wanted not in known:
        what = f"{wanted} of {path} is not a component." if wanted in classes else f"{path} has no class {wanted}."
        raise InputError(what, fix)
    if not wanted and len(own) != 1:
        raise InputError(f"{path} has {f'{len(own)} components' if own else 'no component'}.", fix)
    found = known[wanted or own[0]]
    pairs: list[tuple[type[Component], str]] = [(Component, "run")]
    if issubclass(found, StreamingComponent):
        pairs = [(StreamingComponent, "answers"), (StreamingComponent, "open")]
    if all(getattr(found, method) is getattr(base, method) for base, method in pairs):
        lacks = f"{found.__name__} of {path} has no {pairs[0][1]}"
        given = "batch" if pairs[0][1] == "run" else "inputs, stream"
        raise InputError(f"{lacks}: it cannot answer.", f"Write it: def {pairs[0][1]}(self, {given})")
    return found


def _read_tensors(found: type[Component], side: str, path: Path) -> list[TensorSpec]:
    given: Any = getattr(found, side, ())
    if not given or not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise InputError(f"{found.__name__} of {path} does not declare its {side}.", _DECLARE)
    return [parse_tensor(each, f"{found.__name__}.{side}:") for each in given]


def _write_code(path: Path, found: type[Component], *, is_exported: bool) -> bytes:
    """Return the user's code as a ``model.py``: with the path of the modules beside it, and the class for Triton.

    The path has to be set before the first import; but a docstring and imports from ``__future__`` come first.
    """
    text = importlib.util.decode_source(path.read_bytes())
    body = [node for node in ast.parse(text).body if getattr(node, "module", "") != "__future__"]
    first = body[1] if isinstance(body[0], ast.Expr) and len(body) > 1 else body[0]
    at = min(each.lineno for each in (first, *getattr(first, "decorator_list", ()))) - 1
    lines = text.splitlines(keepends=True)
    head = "" if _HEAD.split("\n")[2] in text else _HEAD
    end = "" if is_exported else f"\n\nTritonPythonModel = {found.__name__}.for_triton()\n"
    return f"{''.join(lines[:at])}{head}{''.join(lines[at:])}{end}".encode()
