"""Reader for the ties in an ONNX model's metadata, without the onnx library: a minimal protobuf parser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from shoal.component.artifact_files import check_file, refusal
from shoal.component.provenance import METADATA, parse_ties

_KIND = "valid ONNX model"
# Numbers of fields in onnx.proto: ModelProto.metadata_props, StringStringEntryProto's key and value.
_METADATA_PROPS, _KEY, _VALUE = 14, 1, 2
# Protobuf's wire types: a varint, bytes behind their length, and the numbers of a fixed size.
_VARINT, _BYTES, _FIXED = 0, 2, {1: 8, 5: 4}
_VARINT_BYTES = 10


def read_onnx(path: Path) -> dict[str, str]:
    """Return the ties of an ONNX model, file name -> sha256; empty if it has none.

    Raises:
        ArtifactError: its outermost fields are not those of an ONNX model, or its ties are damaged.
    """
    check_file(path, _KIND)
    try:
        with path.open("rb") as file:
            entries = [dict(_fields(BytesIO(entry))) for number, entry in _fields(file) if number == _METADATA_PROPS]
        found = {entry.get(_KEY): entry.get(_VALUE, b"") for entry in entries}
        return parse_ties(found.get(METADATA.encode(), b""))
    except OSError as error:
        raise refusal(path, _KIND, f"it cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise refusal(path, _KIND, str(error)) from error


def _fields(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of the metadata fields; skip the others, such as the graph, without reading them."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    while file.tell() < end:
        number, wire_type = divmod(_varint(file), 8)
        if wire_type == _VARINT:
            _varint(file)
            continue
        if wire_type != _BYTES and wire_type not in _FIXED:
            raise ValueError("it is not a protobuf message")
        size = _FIXED[wire_type] if wire_type in _FIXED else _varint(file)
        begin = file.tell()
        if begin + size > end:
            raise ValueError("it is cut off")
        if wire_type == _BYTES and number in (_METADATA_PROPS, _KEY, _VALUE):
            yield number, file.read(size)
        file.seek(begin + size)


def _varint(file: BinaryIO) -> int:
    """Read a varint: seven bits per byte, the lowest first; all bytes but the last have the eighth bit set."""
    value = 0
    for position in range(_VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            raise ValueError("it is cut off")
        value |= (byte[0] & 0x7F) << (7 * position)
        if byte[0] < 0x80:
            return value
    raise ValueError("it is not a protobuf message")
