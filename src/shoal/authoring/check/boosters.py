"""Read the headers of XGBoost and LightGBM models, and UBJSON files, without either library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shoal.system.files import parse_json


class Head(NamedTuple):
    """Header of a model file. ``objective`` is named as in the library; ``num_classes`` is 1 if a row has one score."""

    objective: str
    num_features: int
    num_classes: int = 1
    num_targets: int = 1


def is_json(content: bytes) -> bool:
    """Whether an XGBoost model is in JSON, not in UBJSON; both begin with a brace."""
    return re.match(rb'\s*\{\s*"', content) is not None


def parse_xgboost(content: bytes) -> Any:
    """Parse an XGBoost model in JSON or UBJSON.

    Raises:
        ValueError, RecursionError: ``content`` is damaged.
    """
    return parse_json(content) if is_json(content) else read_ubjson(content)


def read_xgboost_head(learner: Mapping[str, Any]) -> Head:
    """Read the header of a parsed XGBoost model from its object ``learner``.

    Raises:
        LookupError, TypeError, ValueError: the number of features is missing, or a value is not a number.
    """
    about = learner["learner_model_param"]
    return Head(
        str(learner["objective"]["name"]),
        int(about["num_feature"]),
        max(1, int(about.get("num_class", 0))),
        max(1, int(about.get("num_target", 1))),
    )


def read_fields(lines: str) -> dict[str, str]:
    """Parse ``key=value`` lines of LightGBM's text format, either of the header or of one tree."""
    pairs = (line.strip().partition("=") for line in lines.splitlines())
    return {key: value for key, mark, value in pairs if mark}


def read_lightgbm_head(fields: Mapping[str, str]) -> Head:
    """Read the header of a LightGBM model; ``objective`` includes parameters, as in ``binary sigmoid:1``.

    Raises:
        LookupError, ValueError: the number of features is missing, or a value is not a number.
    """
    num_features, num_classes = int(fields["max_feature_idx"]) + 1, int(fields.get("num_class", "1"))
    return Head(fields.get("objective", "").strip(), num_features, num_classes)


# --- UBJSON --------------------------------------------------------------------------------------------------------
# Universal Binary JSON, draft 12 (ubjson.org), in the subset that XGBoost writes. Of its optimised containers, XGBoost
# writes only arrays with a count, typed or untyped: xgboost, src/common/json.cc: UBJWriter.

_NUMBERS: Mapping[str, np.dtype[Any]] = {
    mark: np.dtype(name)
    for mark, name in {"i": ">i1", "U": "u1", "I": ">i2", "l": ">i4", "L": ">i8", "d": ">f4", "D": ">f8"}.items()
}
_CONSTANTS: Mapping[str, Any] = {"Z": None, "T": True, "F": False}


def read_ubjson(data: bytes) -> Any:
    """Parse UBJSON; typed arrays of numbers become NumPy arrays.

    Raises:
        ValueError: ``data`` is cut off, or is not valid UBJSON.
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
