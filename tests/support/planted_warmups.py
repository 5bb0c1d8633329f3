"""Mistakes in warm-up requests.

Where a request fails in the backend, Triton 24.10 refuses the model or crashes: such plants have no words of core's.
"""

from __future__ import annotations

import struct

from tests.support.page_plants import page
from tests.support.planted import MODEL, Edit, Plant, change, config

FIRST = "first/config.pbtxt"
FILE = "first/warmup/x"
TEXT_FILE = "texts/warmup/x"
ZEROS = "zero_data: true"
FROM_FILE = 'input_data_file: "x"'
ROW = struct.pack("<4f", 1, 2, 3, 4)
TEXTS = MODEL.replace(
    '"X").as_numpy()', '"X").as_numpy()\n            x = np.full((len(x), 4), len(x[0, 0]), np.float32)'
)


def request(source: str = ZEROS, *, dtype: str = "TYPE_FP32", dims: str = "[ 4 ]", count: int = 1) -> str:
    return f"""model_warmup {{
  name: "w"
  batch_size: {count}
  inputs {{
    key: "X"
    value {{
      data_type: {dtype}
      dims: {dims}
      {source}
    }}
  }}
}}
"""


# As the pages write it: an input on a line.
LINES = """model_warmup [ {
  name: "w"
  batch_size: 1
  inputs { key: "X" value { data_type: TYPE_FP32 dims: [ 4 ] zero_data: true } }
} ]
"""
IN_LINES: dict[str, Edit] = {FIRST: config("first") + LINES}


def good(source: str = ZEROS, *, count: int = 1, content: bytes | None = None) -> dict[str, Edit]:
    edits: dict[str, Edit] = {FIRST: config("first") + request(source, count=count)}
    return edits if content is None else {**edits, FILE: content}


def of_text(content: bytes) -> dict[str, Edit]:
    """A model that takes a text, and its warm-up request."""
    settings = config("texts").replace("TYPE_FP32 dims: [ 4 ] }\noutput", "TYPE_STRING dims: [ 1 ] }\noutput")
    request_of_text = request(FROM_FILE, dtype="TYPE_STRING", dims="[ 1 ]")
    return {"texts/config.pbtxt": settings + request_of_text, "texts/1/model.py": TEXTS, TEXT_FILE: content}


def edit(old: str, new: str) -> dict[str, Edit]:
    return {FIRST: (old, new)}


def text(content: bytes) -> bytes:
    return struct.pack("<I", len(content)) + content


def plant(name: str, line: str, bad: dict[str, Edit], core: str, before: dict[str, Edit] | None = None) -> Plant:
    rule = (
        "warm-up-input" if core.startswith(("inference", "unexpected shape", "expected 1 inputs")) else "warm-up-data"
    )
    model = "texts" if before is GOOD_TEXT else "first"
    return Plant(name, rule, f"{model}/config.pbtxt", line, bad, before or good(), core=core, model=model)


GOOD_FILE = good(FROM_FILE, content=ROW)
GOOD_TEXT = of_text(text(b"abc"))
PLANTS = (
    page(
        "warm-up-data",
        good={FIRST: config("first") + LINES.replace(ZEROS, FROM_FILE), FILE: ROW},
        core="warmup setting expects all",
    ),
    page("warm-up-mismatch", good=IN_LINES),
    page("warm-up-input", good=IN_LINES, core="unexpected shape"),
    page("warm-up-batch-size", good={FIRST: config("first") + LINES.replace("size: 1", "size: 8")}),
    page("warm-up-skipped", good=IN_LINES, line="model_warmup"),
    plant("a warm-up of no type", "value", edit("      data_type: TYPE_FP32\n", ""), "inference input 'X' data-type"),
    plant(
        "a warm-up of type 99", "data_type", edit("      data_type: TYPE_FP32\n", "      data_type: 99\n"), "inference"
    ),
    plant(
        "a warm-up of integers",
        "data_type",
        edit("      data_type: TYPE_FP32\n", "      data_type: TYPE_INT64\n"),
        "inference",
    ),
    plant(
        "a warm-up of five", "dims", edit("      dims: [ 4 ]", "      dims: [ 5 ]"), "unexpected shape for input 'X'"
    ),
    plant("a warm-up from nowhere", "inputs", edit(f"      {ZEROS}\n", ""), "to have input_data_type set"),
    plant(
        "a warm-up of nothing",
        "model_warmup",
        {FIRST: config("first") + 'model_warmup { name: "w" batch_size: 1 }\n'},
        "expected 1 inputs but got 0",
    ),
    plant("a warm-up by another name", "model_warmup", edit('key: "X"', 'key: "x"'), "expected 1 inputs but got 0"),
    plant(
        "a warm-up without its file", "input_data_file", {FILE: None}, "failed to open text file for read", GOOD_FILE
    ),
    plant("a warm-up file of three", "input_data_file", {FILE: ROW[:12]}, "warmup setting expects 16 bytes", GOOD_FILE),
    plant(
        "a warm-up of two texts",
        "input_data_file",
        {TEXT_FILE: text(b"a") * 2},
        "unexpected number of string",
        GOOD_TEXT,
    ),
    *(
        Plant(name, "warm-up-mismatch", "texts/config.pbtxt", "input_data_file", {TEXT_FILE: content}, GOOD_TEXT)
        for name, content in (
            ("a warm-up of half a text", text(b"abc")[:5]),
            ("a warm-up of a bare text", b"hello world"),
        )
    ),
    plant("a warm-up of an empty file", "input_data_file", {TEXT_FILE: b""}, "expected 1 string elements", GOOD_TEXT),
    Plant("a warm-up file of seven", "warm-up-mismatch", FIRST, "input_data_file", {FILE: ROW + ROW[:12]}, GOOD_FILE),
    Plant(
        "a warm-up file of a batch",
        "warm-up-mismatch",
        FIRST,
        "input_data_file",
        {FILE: ROW * 3},
        good(FROM_FILE, count=2, content=ROW * 2),
    ),
    change(
        "alone/config.pbtxt",
        "warm-up-batch-size",
        "a warm-up of two without batches",
        "  batch_size: 1",
        "  batch_size: 2",
        good={
            "alone/config.pbtxt": config("alone", batching="").replace("size: 8", "size: 0") + request(),
            "alone/1/model.py": MODEL,
        },
    ),
)
