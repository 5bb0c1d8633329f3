"""Types of the arrays that a ``model.py`` makes, as far as its code says them."""

from __future__ import annotations

import ast

from shoal.authoring.check.python.source import SourceFile, argument
from shoal.kit.component.spec import DTYPES

UNICODE = "str_"
_PLAIN = {"float": "float64", "int": "int64", "bool": "bool_", "object": "object_", "str": UNICODE, "bytes": "bytes_"}
_KNOWN = {*_PLAIN.values(), *(f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64))}
# Position of the argument dtype in functions of NumPy; those of floats make float64 without it.
_MAKES = {"array": 1, "asarray": 1, "zeros": 1, "ones": 1, "empty": 1, "full": 2, "stack": 9, "concatenate": 9}
_OF_FLOATS = ("zeros", "ones", "empty", "linspace", "random.rand", "random.randn", "random.random")
_TENSORS = frozenset(
    f"torch.{name}" for name in "from_numpy tensor as_tensor zeros ones cat stack softmax sigmoid".split()
)
_KEEPS = ("reshape", "ravel", "flatten", "squeeze", "transpose", "copy", "expand_dims", "ascontiguousarray")


def name_dtype(declared: str) -> str:
    """Return NumPy's name of a type such as ``TYPE_FP32``; empty for those without one."""
    if declared not in DTYPES:
        return ""
    name = getattr(DTYPES[declared], "__name__", "")
    return f"{name}_" if name in ("bool", "object") else name


def find_dtype(source: SourceFile, node: ast.AST) -> str:
    """Return the dtype that an array certainly has, such as ``float64``; empty if unknown.

    Arrays of bytes count as ``object_``: the Python backend takes both for TYPE_STRING.
    """
    match source.follow(node):
        case ast.Call(func=ast.Attribute(attr="astype"), args=[given, *_]):
            return _read(source, given)
        case ast.Call(func=ast.Attribute(attr=attr, value=value) as made, args=args) as call:
            function = source.name(made).removeprefix("numpy.")
            if attr in _KEEPS:
                return find_dtype(source, args[0] if function == attr and args else value)
            if source.name(made) != f"numpy.{function}":
                return ""
            dtype = argument(call, _MAKES.get(function, 9), "dtype")
            if dtype is not None:
                return _read(source, dtype)
            if function in _OF_FLOATS:
                return "float64"
            return _find_element(source, args[0]) if function in ("array", "asarray") and args else ""
    return ""


def _read(source: SourceFile, node: ast.AST) -> str:
    """Return the dtype that an argument names."""
    name = node.value if isinstance(node, ast.Constant) else source.name(node).removeprefix("numpy.")
    name = _PLAIN.get(str(name), str(name))
    name = f"{name}_" if f"{name}_" in _KNOWN else name
    return "object_" if name == "bytes_" else name if name in _KNOWN else ""


def _find_element(source: SourceFile, node: ast.AST) -> str:
    """Return the dtype that NumPy gives a list of elements without a dtype."""
    match source.follow(node):
        case ast.List(elts=[first, *others]):
            found = {_find_element(source, each) for each in (first, *others)}
            return found.pop() if len(found) == 1 else ""
        case ast.ListComp(elt=element):
            return _find_element(source, element)
        case ast.Constant(value=float()):
            return "float64"
        case ast.Constant(value=str()) | ast.JoinedStr() | ast.Call(func=ast.Attribute(attr="decode")):
            return UNICODE
        case ast.Call(func=ast.Attribute(value=value, attr=attr)) if hasattr(str, attr) and attr != "encode":
            return UNICODE if _find_element(source, value) == UNICODE else ""
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return UNICODE if UNICODE in (_find_element(source, left), _find_element(source, right)) else ""
        case ast.Call(func=ast.Name(id="float" | "str" | "int" | "len" as name)):
            return _PLAIN.get(name, "int64")
    return ""


def is_torch(source: SourceFile, node: ast.AST) -> bool:
    """Whether an expression is certainly a tensor of PyTorch."""
    match source.follow(node):
        case ast.BinOp(left=left, right=right):
            return is_torch(source, left) or is_torch(source, right)
        case ast.Call(func=ast.Attribute(value=value, attr=attr) as made):
            if attr in ("detach", "cpu", "cuda"):
                return True
            keeps = attr not in ("numpy", "tolist", "item", "size", "dim", "numel", "data_ptr")
            return keeps and (source.name(made) in _TENSORS or is_torch(source, value))
    return False
