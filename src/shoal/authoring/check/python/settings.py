"""Rules for what a ``model.py`` reads while it loads: the arguments of ``initialize``, parameters, files, and NumPy."""

from __future__ import annotations

import ast
import json
from contextlib import suppress
from functools import partial
from pathlib import Path

from shoal.authoring.check.artifacts import UNREADABLE
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, exists
from shoal.authoring.check.python.source import PB, SourceFile, argument, examine, is_literal
from shoal.system.files import read_bytes

ARGS = Rule("wrong-args-key", Severity.ERROR, is_core=True)
PARAMETER = Rule("parameter-missing", Severity.ERROR, is_core=True)
RELATIVE = Rule("file-opened-relative", Severity.ERROR, is_core=True)
ABSENT = Rule("file-not-there", Severity.ERROR, is_core=True)
LETTERS = Rule("text-beyond-ascii", Severity.ERROR, is_core=True)
NUMPY = Rule("numpy-name-removed", Severity.ERROR, is_core=True)

_KEYS = """model_config model_instance_kind model_instance_name model_instance_device_id model_repository model_version
model_name""".split()
_CONFIGS = (f"{PB}.get_input_config_by_name", f"{PB}.get_output_config_by_name")
_TEXT = "TypeError: args['model_config'] is a text, of which this takes a part by name."
_PARSE = "Parse it first: json.loads(args['model_config'])"
_KEEP_PATHS = """os.path.join os.path.dirname os.path.abspath os.path.realpath os.path.normpath os.fspath str
pathlib.Path""".split()
_TAKE_TEXT = ("int", "float", "open", "os.path.join", "json.loads", "pathlib.Path", "numpy.float32")
_NUMBERS = {"int": int, "float": float}
# What reads the file or folder that its first argument names.
_READERS = frozenset(
    """open io.open os.listdir numpy.load numpy.loadtxt torch.load torch.jit.load joblib.load PIL.Image.open
    onnxruntime.InferenceSession pandas.read_csv tokenizers.Tokenizer.from_file""".split()
)
_MAKES_FILES = frozenset({"makedirs", "mkdir", "extractall", "urlretrieve", "snapshot_download", "hf_hub_download"})
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
                yield from found if found and source.runs_in(node) == "initialize" else ()
            if isinstance(node, ast.Call) and (read := _find_read(source, node)):
                yield from _check_file(source, node, read, model)
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
        case ast.Call(args=[text, *_]) if (
            source.name(node.func) in _TAKE_TEXT
            and _is_given(text, model)
            and kind(text) == "parameter"
            and not _may_be_set(source, "string_value")
        ):
            what = "TypeError: a parameter is a mapping, and its text is one of its values."
            yield PARAMETER.at(place, what, f'Write {ast.unparse(text)}["string_value"].')
        case ast.Subscript(value=value, slice=part, ctx=ast.Load()) if found := kind(value):
            for key in source.find_texts(part):
                if _may_be_set(source, key):
                    continue
                if found == "args" and key not in _KEYS:
                    yield ARGS.at(place, f"KeyError: args has no '{key}'.", f"Known: {', '.join(_KEYS)}.")
                elif found.startswith("parameters") and key not in model.parameters and not model.is_model_folder:
                    what = f"KeyError: it reads the parameter '{key}', which {model.name} does not have."
                    fix = f'Add parameters {{ key: "{key}" value {{ string_value: "..." }} }}.'
                    yield PARAMETER.at(place, what, fix)
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


def _is_given(node: ast.AST, model: Model) -> bool:
    """Whether the configuration has the parameter that ``node`` reads."""
    named = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return isinstance(node, ast.Name) or not model.parameters.keys().isdisjoint(map(str, named))


def _may_be_set(source: SourceFile, key: str) -> bool:
    """Whether the code itself may set a key of a mapping."""
    stored = [node for node in source.nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    stored = [n for n in stored if isinstance(source.follow(n.value), ast.arg) or _find_kind(source, n.value)]
    is_stored = any(is_literal(node.slice, key) or not isinstance(node.slice, ast.Constant) for node in stored)
    return is_stored or bool(source.words & {"setdefault", "update"})


def _find_kind(source: SourceFile, node: ast.AST) -> str:
    """Return what an expression in ``initialize`` is: args, text, config, parameters (as texts); empty if unknown."""
    match source.follow(node):
        case ast.arg() as given if source.is_passed(given) and source.always_in(given, may_leave=True) == "initialize":
            return "args"
        case ast.Subscript(value=value, slice=ast.Constant(value="model_config")):
            return "text" if _find_kind(source, value) == "args" else ""
        case (
            ast.Subscript(value=value, slice=ast.Constant(value=str(key)))
            | ast.Call(func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=str(key)), *_])
        ):
            found = _find_kind(source, value)
            return "parameters" if (found, key) == ("config", "parameters") else "parameter" * (found == "parameters")
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Call(func=ast.Attribute(value=value, attr="items")))]):
            return "parameters as texts" if _find_kind(source, value) == "parameters" else ""
        case ast.Call(args=[text]) as call if source.name(call.func) == "json.loads":
            return "config" if _find_kind(source, text) == "text" else ""
    return ""


def _find_read(source: SourceFile, call: ast.Call) -> tuple[ast.expr | None, ast.expr | None, bool] | None:
    """Return what a call reads: its path, the encoding, and whether it is read as text; None if it reads no file."""
    match call.func:
        case ast.Attribute(value=owner, attr="read_text"):
            return owner, argument(call, 0, "encoding"), True
        case ast.Attribute(value=owner, attr="read_bytes"):
            return owner, None, False
    if source.name(call.func) not in _READERS:
        return None
    path, mode = argument(call, 0, "file"), argument(call, 1, "mode")
    if source.name(call.func) not in ("open", "io.open"):
        return path, None, False
    is_read = mode is None or is_literal(mode, "r", "rb", "rt")
    return (path, argument(call, 3, "encoding"), not is_literal(mode, "rb")) if is_read else None


def _check_file(
    source: SourceFile, call: ast.Call, read: tuple[ast.expr | None, ast.expr | None, bool], model: Model
) -> Findings:
    """Find a file that is not there, is not text or JSON as read, or is opened by its name alone.

    Triton runs in another folder than the model's, and the embedded one in an empty one.
    """
    given, encoding, is_text = read
    if given is None or source.runs_in(call) not in _LOADED:
        return
    path = _find_path(source, given, model)
    is_own = path is not None and path.is_relative_to(model.folder) and not model.is_model_folder
    if path is not None and is_own and not exists(path) and not source.words & _MAKES_FILES:
        what = f"FileNotFoundError: {path.relative_to(model.folder)} is not in the model's folder."
        yield ABSENT.at(source.at(call), what, "Copy it there. args['model_repository'] is the model's own folder.")
    if path is not None and is_own and is_text:
        yield from _check_text(source, call, path, encoding)
    is_name = isinstance(source.follow(given), ast.Constant | ast.arg)
    if is_name and path is not None and not path.is_absolute() and "chdir" not in source.words:
        folders = [folder for folder in (source.path.parent, model.folder) if path.name and exists(folder / path)]
        if folders or model.is_fixed:
            what = f"FileNotFoundError: {path} is looked for in Triton's own folder, not beside model.py."
            fix = f"Write Path(__file__).with_name({str(path)!r})."
            if folders[:1] == [model.folder]:
                fix = f"Write Path(__file__).parents[1] / {str(path)!r}."
            yield RELATIVE.at(source.at(call), what, fix)


def _check_text(source: SourceFile, call: ast.Call, path: Path, encoding: ast.expr | None) -> Findings:
    """Find bytes of a file that are not in the encoding, or that are no JSON where the code reads JSON of one file."""
    try:
        content = read_bytes(path)  # at most 16 MiB
        text = content.decode("ascii" if encoding is None else ast.literal_eval(encoding))
    except UnicodeDecodeError as error:
        opened = "opens it as ASCII" if encoding is None else f"opens it as {error.encoding}"
        what = f"UnicodeDecodeError: in Triton, this {opened}, and {path.name} has other bytes."
        is_utf_8 = encoding is None and _is_utf_8(content)
        fix = 'Add encoding="utf-8".' if is_utf_8 else f"Save {path.name} as UTF-8, and read it so."
        yield LETTERS.at(source.at(call), what, fix)
        return
    except (OSError, ValueError, TypeError, LookupError):  # no file, or an encoding that is not a literal or not known
        return
    if path.suffix == ".json" and {"load", "loads"} & source.words and not _is_json(text.partition("\n")[0]):
        try:
            json.loads(text)
        except ValueError as error:
            yield UNREADABLE.at(
                Place(path, getattr(error, "lineno", 1)), f"{type(error).__name__}: {error}.", "Correct it."
            )


def _is_utf_8(content: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        return bool(content.decode())
    return False


def _is_json(line: str) -> bool:
    """Whether a file's first line is JSON for itself, as in files of one value a line."""
    with suppress(ValueError):
        return json.loads(line) is not None
    return False


def _find_path(source: SourceFile, node: ast.AST, model: Model) -> Path | None:
    """Return the path that an expression makes of ``args``, ``__file__`` and literals; None if unknown."""
    find = partial(_find_path, source, model=model)
    own = {
        "model_repository": model.folder,
        "model_version": Path(source.path.parent.name),
        "model_name": Path(model.folder.name),
    }
    parts: list[Path | None] = []
    match source.follow(node):
        case ast.Constant(value=str(text)):
            return Path(text)
        case ast.arg() as given:
            passed = source.find_given(given)
            return find(passed[0]) if len(passed) == 1 and passed[0] is not None else None
        case ast.Name(id="__file__"):
            return source.path
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))) if _find_kind(source, value) == "args":
            return own.get(key)
        case ast.Attribute(value=value, attr="parent"):
            parts, levels = [find(value)], 1
        case ast.Subscript(value=ast.Attribute(value=value, attr="parents"), slice=ast.Constant(value=int(number))):
            parts, levels = [find(value)], number + 1
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            parts, levels = [find(left), find(right)], 0
        case ast.Call(func=ast.Attribute(value=value, attr="resolve" | "absolute"), args=[]):
            parts, levels = [find(value)], 0
        case ast.Call(func=ast.Attribute(value=value, attr="joinpath"), args=args):
            parts, levels = [find(value), *map(find, args)], 0
        case ast.Call(func=ast.Attribute(value=value, attr="with_name"), args=[name]):
            above = find(value)
            parts, levels = [above and above.parent, find(name)], 0
        case ast.Call(func=made, args=[_, *_] as args):
            function = source.name(made)
            levels = 1 if function == "os.path.dirname" else 0
            parts = [*map(find, args)] if function in _KEEP_PATHS else []
    if not parts or None in parts:
        return None
    joined = Path(*(part for part in parts if part is not None))
    return joined.parents[levels - 1] if levels and len(joined.parents) >= levels else joined
