"""Commands for NVIDIA's container, taken apart; and a language model to compose for it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.support.tokenizers import byte_level


def find_installed(command: str) -> list[str]:
    """Return the lines that the command gives to pip."""
    script = shlex.split(command.replace("\\\n", " "))[-1]
    found = re.match(r"pip install (.*?) && exec ", script)
    return shlex.split(found[1]) if found else []


def write_weights(folder: Path) -> Path:
    """Write a language model's folder without a chat template, whose weights and decoder nothing reads."""
    folder.mkdir()
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "decoder.onnx").write_bytes(b"decoder")
    return folder
