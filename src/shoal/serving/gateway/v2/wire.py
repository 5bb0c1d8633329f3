"""Fields of a serialised protobuf message, found without parsing it.

Parsing takes time and memory that grow with the number of fields, and stops all threads meanwhile. A field is a tag
(its number, and the kind of its value) and a value, whose first bytes say where it ends. So fields can be counted, and
large ones left out, before the rest is parsed.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shoal.serving.gateway.refusals import RefusalReason, RefusedError, wrong

MOST_FIELDS = 4096  # of a request, with the fields of its parameters, inputs and outputs
MOST_VALUES = 2**16  # of all tensors whose values are fields each
MOST_BYTES = 2**16  # of a request, and of each of its inputs, without the fields that are left out
_VARINT, _BYTES = 0, 2  # kinds of values; others have a fixed width
_WIDTHS = {1: 8, 5: 4}
_FIXED, _TEXTS = {6: 4, 7: 8}, 8  # fields of an InferTensorContents: bytes per value; a field per value
_CHUNK = 2**16  # bytes
_TOO_LONG = re.compile(rb"[\x80-\xff]{10}")  # for a number


class Budget:
    """Number of fields that may still be read."""

    def __init__(self, most: int = MOST_FIELDS, message: str = "") -> None:
        self._left = most
        self._message = message or f"The request has more than {most} fields: parameters, inputs and outputs."

    def spend(self) -> None:
        """Count a field; raise ``RefusedError`` if there are too many."""
        self._left -= 1
        if self._left < 0:
            raise wrong(self._message)


class Field(NamedTuple):
    """Place of a field: where it begins, and where its value begins and ends."""

    number: int
    kind: int
    begin: int
    value: int
    end: int


def read_fields(content: bytes, begin: int, end: int, budget: Budget) -> Iterator[Field]:
    """Yield the fields of the message at ``content[begin:end]``.

    Raises:
        RefusedError: there are too many fields, or these bytes are not a message.
    """
    while begin < end:
        budget.spend()
        tag, value = _read_number(content, begin, end)
        kind, stop = tag & 7, value
        if kind == _BYTES:
            size, value = _read_number(content, value, end)
            stop = value + size
        elif kind == _VARINT:
            stop = _read_number(content, value, end)[1]
        else:
            stop += _WIDTHS.get(kind, end)  # beyond the end for an unknown kind
        if stop > end or not 0 < tag >> 3 < 2**29:
            raise _not_a_message()
        yield Field(tag >> 3, kind, begin, value, stop)
        begin = stop


def _read_number(content: bytes, begin: int, end: int) -> tuple[int, int]:
    """Read a number, seven bits per byte, lowest first; return it, and where it ends."""
    number = 0
    for index in range(begin, min(begin + 10, end)):
        number |= (content[index] & 0x7F) << 7 * (index - begin)
        if content[index] < 0x80:
            return number, index + 1
    raise _not_a_message()


def _not_a_message() -> RefusedError:
    return wrong("The message is not a ModelInferRequest.")


def split(
    content: bytes, begin: int, end: int, budget: Budget, *, apart: Collection[int], once: Mapping[int, str]
) -> tuple[bytes, list[Field]]:
    """Split the message at ``content[begin:end]`` into the places of the fields ``apart``, and the other fields.

    The fields ``once``, with their names, may not be repeated: Triton must read what was screened.

    Raises:
        RefusedError: there are too many fields, a field is repeated, or these bytes are not a message.
    """
    others, found, seen = list[bytes](), list[Field](), set[int]()
    for field in read_fields(content, begin, end, budget):
        if field.number in once and field.number in seen:
            raise wrong(f"The request has a field {once[field.number]} twice. Give it once.")
        seen.add(field.number)
        if field.kind == _BYTES and field.number in apart:
            found.append(field)
        else:
            others.append(content[field.begin : field.end])
    joined = b"".join(others)
    if len(joined) > MOST_BYTES:
        raise RefusedError(
            RefusalReason.LARGE, f"{len(joined)} bytes of names and parameters; at most {MOST_BYTES} are read."
        )
    return joined, found


def find_text(content: bytes, number: int, most: int) -> str:
    """Return the text of a message's first field ``number`` of at most ``most`` bytes; empty if there is none."""
    with contextlib.suppress(RefusedError):
        for field in read_fields(content, 0, len(content), Budget()):
            if field.number == number and field.end - field.value <= most:
                return content[field.value : field.end].decode("utf-8", "replace")
    return ""


def make_value_budget() -> Budget:
    """Return the number of values of a request that may be fields of their own."""
    advice = "Send them as raw_input_contents."
    return Budget(MOST_VALUES, f"The request has more than {MOST_VALUES} strings as contents of its inputs. {advice}")


def count_values(content: bytes, begin: int, end: int, budget: Budget) -> int:
    """Count the values in an ``InferTensorContents``: those of the field that has most.

    Raises:
        RefusedError: too many values are fields of their own, or these bytes are not a message.
    """
    counts = Counter[int]()
    for number, kind, _, value, stop in read_fields(content, begin, end, budget):
        if kind != _BYTES or number == _TEXTS:
            counts[number] += 1
        elif number in _FIXED:
            counts[number] += (stop - value) // _FIXED[number]
            if (stop - value) % _FIXED[number]:
                raise _not_a_message()
        else:
            counts[number] += sum(_count_numbers(content, start, stop) for start in range(value, stop, _CHUNK))
    return max(counts.values(), default=0)


def _count_numbers(content: bytes, begin: int, end: int) -> int:
    """Count the numbers that end in the chunk of ``content[begin:end]`` at ``begin``."""
    stop = min(begin + _CHUNK, end)
    if content[end - 1] >= 0x80 or _TOO_LONG.search(content, begin, min(stop + 9, end)):
        raise _not_a_message()
    return int(np.count_nonzero(np.frombuffer(content, np.uint8, stop - begin, begin) < 0x80))
