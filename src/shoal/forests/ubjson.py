"""Reader for Universal Binary JSON, the subset that XGBoost writes.

The format: ubjson.org, draft 12. Of UBJSON's optimised containers, XGBoost writes only arrays with a count,
typed or untyped: xgboost, src/common/json.cc: UBJWriter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_NUMBERS: Mapping[str, np.dtype[Any]] = {
    mark: np.dtype(name)
    for mark, name in {"i": ">i1", "U": "u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}.items()
}
_CONSTANTS: Mapping[str, Any] = {"Z": None, "T": True, "F": False}


def read_ubjson(data: bytes) -> Any:
    """Parse ``data``; typed arrays of numbers become NumPy arrays.

    Raises:
        ValueError: it is cut off, or is not valid UBJSON.
    """
    reader = _Reader(data)
    try:
        value = reader.value(reader.mark())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at:,} bytes too many")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self.data) - self.at:
            raise ValueError(f"it is cut off, or damaged, at byte {self.at:,}")
        self.at += size
        return self.data[self.at - size : self.at]

    def mark(self) -> str:
        return self.take(1).decode("latin-1")

    def numbers(self, mark: str, count: int) -> np.ndarray[Any, Any]:
        kind = _NUMBERS[mark]
        return np.frombuffer(self.take(kind.itemsize * count), kind)

    def count(self) -> int:
        mark = self.mark()
        if mark not in "iUIlL":
            raise ValueError(f"a length of type {mark!r} at byte {self.at:,}")
        return int(self.numbers(mark, 1)[0])

    def text(self) -> str:
        return self.take(self.count()).decode("utf-8")

    def value(self, mark: str) -> Any:
        if mark in _NUMBERS:
            return self.numbers(mark, 1)[0].item()
        if mark in _CONSTANTS:
            return _CONSTANTS[mark]
        if mark == "S":
            return self.text()
        if mark == "[":
            return self.array()
        if mark == "{":
            return self.object()
        raise ValueError(f"{mark!r} at byte {self.at - 1:,} means nothing")

    def array(self) -> Any:
        mark = self.mark()
        if mark == "$":
            kind = self.mark()
            if kind not in _NUMBERS or self.mark() != "#":
                raise ValueError(f"an array of type {kind!r} at byte {self.at:,}")
            return self.numbers(kind, self.count())
        if mark == "#":
            return [self.value(self.mark()) for _ in range(self.count())]
        values = []
        while mark != "]":
            values.append(self.value(mark))
            mark = self.mark()
        return values

    def object(self) -> dict[str, Any]:
        values = {}
        while self.data[self.at : self.at + 1] != b"}":
            name = self.text()
            values[name] = self.value(self.mark())
        self.at += 1
        return values
