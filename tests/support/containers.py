"""Commands for NVIDIA's container, taken apart; and a language model to compose for it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from tests.support.tokenizers import byte_level

KIND = "instance_group [ {{ kind: {} }} ]"
ON_HOST = KIND.format("KIND_CPU")


def write(repository: Path, name: str, text: str, code: str = "") -> Path:
    """Write a model by hand: no manifest, and a configuration as people write it."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
    if code:
        (repository / name / "1" / "model.py").write_text(code, encoding="utf-8")
    return repository


def native(backend: str, more: str = ON_HOST) -> str:
    return f'backend: "{backend}"\nmax_batch_size: 0\n{more}\n'


def engine(folder: Path, ranks: int) -> str:
    """Write an engine's description; return the configuration of a model on TensorRT-LLM."""
    folder.mkdir()
    about = {"pretrained_config": {"mapping": {"world_size": ranks, "tp_size": ranks}}}
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    return native("tensorrtllm", f'parameters {{ key: "gpt_model_path" value {{ string_value: "{folder}" }} }}')


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
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (folder / "decoder.onnx").write_bytes(b"decoder")
    return folder
