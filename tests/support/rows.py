"""Requests of many rows to engines with whole answers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.support.llm import ENGINE

ROWS = [1, 2, 16, 64]


def make_config(dtype: str = "INT32", *, has_prompt: bool = False, engine: str = "llm-hf") -> str:
    """The engine's configuration without its line about pieces, and with rows."""
    text = (ENGINE.parent / engine / "config.pbtxt").read_text(encoding="utf-8")
    text = text.replace("model_transaction_policy { decoupled: true }\n", "").replace(": 1\n", ": 64\n", 1)
    ids = "input_ids|input_lengths|request_output_len|end_id|pad_id|output_ids|sequence_length"
    text = re.sub(rf'(name: "(?:{ids})" data_type: TYPE_)INT32', rf"\1{dtype}", text)
    exclude = 'parameters { key: "exclude_input_in_output" value { string_value: "false" } }\n'
    return text + (exclude if has_prompt else "")


def prompts(number: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(4, 480, random.integers(1, 40)).tolist() for _ in range(number)]


def stack(asked: list[list[int]], dtype: str, new: int = 6, **more: Any) -> dict[str, Any]:
    """One request: prompts padded with 0."""
    kind = np.dtype(dtype.lower())
    ids = np.zeros((len(asked), max(map(len, asked))), kind)
    for row, prompt in zip(ids, asked, strict=True):
        row[: len(prompt)] = prompt
    return {
        "input_ids": ids,
        "input_lengths": np.array([[len(each)] for each in asked], kind),
        "request_output_len": np.full((len(asked), 1), new, kind),
        **({"end_id": np.full((len(asked), 1), -1, kind)} if dtype == "INT32" else {}),
        **more,
    }
