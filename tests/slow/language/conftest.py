"""One service for the tests of language models that neither stop it, nor fill it, nor configure it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import read_config, write_config
from shoal.clients.local import Pipeline, load
from shoal.lab.tiny_llm import make_tiny
from tests.support.imports import add
from tests.support.llm import ENGINE
from tests.support.once import ROOT
from tests.support.planted import write
from tests.support.rows import make_config
from tests.support.service import Service
from tests.support.vllm import lengthen, make_repository

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}assistant:"
)


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny weights, with a chat template that reads a variable."""
    folder = make_tiny(tmp_path_factory.mktemp("weights") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="package")
def repository(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``llm`` and ``llm_bls`` on llm-hf, ``llm_onnx`` on ONNX Runtime, engines of whole answers, and Llama 2's.

    Of the engines, ``INT32`` gives new tokens, and ``UINT32`` the prompt first. ``llamav2`` is greedy and short, and
    ``llamav2.plain`` has no batches.
    """
    home = tmp_path_factory.mktemp("language")
    for name in ("INT32", "UINT32"):
        config = make_config(name, has_prompt=name == "UINT32").replace('"llm-hf"', f'"{name}"')
        write(home / "models" / name / "config.pbtxt", config)
        write(home / "models" / name / "1" / "model.py", (ENGINE / "1" / "model.py").read_text(encoding="utf-8"))
    add(home, folder, "tiny-onnx", task="generate")
    message = read_config(ROOT / "ensembles" / "llm").message
    message.name, message.ensemble_scheduling.step[1].model_name = "llm_onnx", "tiny-onnx"
    (home / "ensembles" / "llm_onnx" / "1").mkdir(parents=True)
    write_config(message, home / "ensembles" / "llm_onnx" / "config.pbtxt", comment="On ONNX Runtime.")
    names = ["llm", "llm_bls", "llm_onnx", "llamav2", "INT32", "UINT32"]
    repository = compose(names, home / "repository", projects=[home], weights=folder)
    message = read_config(repository / "llamav2").message
    message.parameters["top_k"].string_value, message.parameters["max_tokens"].string_value = "1", "16"
    write_config(message, repository / "llamav2" / "config.pbtxt", comment="Tuned by hand.")
    plain = shutil.copytree(repository / "llamav2", repository / "llamav2.plain")  # as the first articles have it
    message.name, message.max_batch_size = plain.name, 0
    message.ClearField("dynamic_batching")
    message.ClearField("model_warmup")
    write_config(message, plain / "config.pbtxt", comment="Without batches.")
    return repository


@pytest.fixture(scope="package")
def service(repository: Path) -> Iterator[Service]:
    with Service(repository, repository.parent / "log", "--trusted-proxy", "127.0.0.1") as running:
        yield running


@pytest.fixture(scope="package")
def here(repository: Path) -> Iterator[Callable[[str], Pipeline]]:
    """A model of the repository in this process, by its name, loaded once."""
    with ExitStack() as held:
        yield cache(lambda name: held.enter_context(load(repository / name)))


@pytest.fixture(scope="package")
def vllm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Both pipelines on vLLM, with four slots; ``test_vllm.py``, the last file that asks it, stops it."""
    place = tmp_path_factory.mktemp("vllm")
    with Service(make_repository(lengthen(folder, place), place, slots=4), place / "log") as running:
        yield running
