"""Rules for what a ``model.py`` reads while it loads: the arguments of ``initialize``, parameters, files, and NumPy."""

from __future__ import annotations

import ast
from functools import partial

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository, exists
from shoal.authoring.check.python.source import PB, SourceFile, argument, examine, is_literal

ARGS = Rule("wrong-args-key", Severity.ERROR, is_core=True)
PARAMETER = Rule("parameter-missing", Severity.ERROR, is_core=True)
RELATIVE = Rule("file-opened-relative", Severity.ERROR, is_core=True)
NUMPY = Rule("numpy-name-removed", Severity.ERROR, is_core=True)

_KEYS = """model_config model_instance_kind model_instance_name model_instance_device_id model_repository model_version
model_name""".split()
_CONFIGS = (f"{PB}.get_input_config_by_name", f"{PB}.get_output_config_by_name")
_TEXT = "TypeError: args['model_config'] is a text, of which this takes a part by name."
_PARSE = "Parse it first: json.loads(args['model_config'])"
_NUMBERS = {"int": int, "float": float}
_LOADED = ("", "initialize")  # code that always runs when the model loads
_FIRST_NUMPY_124 = (23, 3)  # release whose images were built after NumPy 1.24 appeared
_REMOVED = frozenset(f"numpy.{name}" for name in ("float", "int", "object", "complex", "str", "unicode"))


def find(model: Model, repository: Repository) -> Findings:
    """Find keys, parameters, files and names of NumPy that the code of a Python model reads and that are not there."""
    target = repository.target if not model.may_bring_python else None
    is_new = target is not None and target.release >= _FIRST_NUMPY_124

    def look(source: SourceFile) -> Findings:
        for node in source.nodes:
            if isinstance(node, ast.Subscript | ast.Call):
                found = list(_check_reads(source, node, model))
                yield from found if found and source.always_in(node) == "initialize" else ()
            if isinstance(node, ast.Call) and source.name(node.func) in ("open", "io.open"):
                yield from _check_file(source, node, model)
            name = source.name(node) if is_new and isinstance(node, ast.Attribute) else ""
            if name in _REMOVED and source.always_in(node) in (*_LOADED, "execute"):
                what = f"Since NumPy 1.24: module 'numpy' has no attribute '{name.removeprefix('numpy.')}'."
                yield NUMPY.at(source.at(node), what, "Write float, int, str, complex or object: they are the same.")

    if model.message is not None:
        yield from examine(model, look)


def _check_reads(source: SourceFile, node: ast.Subscript | ast.Call, model: Model) -> Findings:
    """Find a wrong key of ``args``, a configuration that is not parsed, and a parameter that is missing or wrong."""
    kind, place = partial(_find_kind, source), source.at(node)
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key)), ctx=ast.Load()):
            found = kind(value)
            if found and _may_be_set(source, key):
                return
            if found == "args" and key not in _KEYS:
                yield ARGS.at(place, f"KeyError: args has no '{key}'.", f"Known: {', '.join(_KEYS)}.")
            elif found == "parameters" and key not in model.parameters and not model.is_model_folder:
                what = f"KeyError: it reads the parameter '{key}', which {model.name} does not have."
                yield PARAMETER.at(place, what, f'Add parameters {{ key: "{key}" value {{ string_value: "..." }} }}.')
            elif found == "text":
                yield ARGS.at(place, _TEXT, _PARSE)
        case ast.Call(args=[text, *_]) if source.name(node.func) in _CONFIGS and kind(text) == "text":
            yield ARGS.at(place, _TEXT, _PARSE)
        case ast.Call(func=ast.Name(id="int" | "float" as name), args=[ast.Subscript(value=ast.Subscript() as read)]):
            key = getattr(read.slice, "value", "")
            given = model.parameters.get(key, "${") if kind(read.value) == "parameters" else "${"
            try:
                _NUMBERS[name]("0" if "${" in given else given)
            except ValueError:
                what = f"ValueError: it reads the parameter '{key}' with {name}(), and its value is {given!r:.60}."
                yield PARAMETER.at(model.at_entry("parameters", key=key), what, f"Write a number that {name}() takes.")


def _may_be_set(source: SourceFile, key: str) -> bool:
    """Whether the code itself may set a key of a mapping."""
    stored = (node for node in source.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
    return bool(source.words & {"setdefault", "update"}) or any(is_literal(node.slice, key) for node in stored)


def _find_kind(source: SourceFile, node: ast.AST) -> str:
    """Return what an expression in ``initialize`` is: args, text, config or parameters; empty if unknown."""
    match source.follow(node):
        case ast.arg() as given if source.is_passed(given):
            return "args"
        case ast.Subscript(value=value, slice=ast.Constant(value="model_config")):
            return "text" if _find_kind(source, value) == "args" else ""
        case ast.Subscript(value=value, slice=ast.Constant(value="parameters")):
            return "parameters" if _find_kind(source, value) == "config" else ""
        case ast.Call(args=[text]) as call if source.name(call.func) == "json.loads":
            return "config" if _find_kind(source, text) == "text" else ""
    return ""


def _check_file(source: SourceFile, call: ast.Call, model: Model) -> Findings:
    """Find a file that is opened by its name alone: Triton runs in another folder, the embedded one in an empty one."""
    match argument(call, 0, "file"), argument(call, 1, "mode"):
        case ast.Constant(value=str(name)), None | ast.Constant(value="r" | "rb" | "rt") if not name.startswith("/"):
            folders = [folder for folder in (source.path.parent, model.folder) if name and exists(folder / name)]
            is_certain = source.always_in(call) in _LOADED and "chdir" not in source.words
            if is_certain and (folders or model.is_fixed):
                what = f"FileNotFoundError: {name} is looked for in Triton's own folder, not beside model.py."
                fix = f"Write Path(__file__).with_name({name!r})."
                if folders[:1] == [model.folder]:
                    fix = f"Write Path(__file__).parents[1] / {name!r}."
                yield RELATIVE.at(source.at(call), what, fix)
