"""Requests of many rows to every engine, in both dtypes and forms, from every host: each row is the single request."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from shoal.authoring.composition.compose import compose
from shoal.lab.tiny_llm import make_tiny
from tests.conftest import Scale, verified
from tests.support.imports import add
from tests.support.once import ROOT
from tests.support.planted import write
from tests.support.rows import ROWS, make_config, prompts, stack
from tests.support.service import Service
from tests.support.vllm import find_vllm

DTYPES = ("INT32", "UINT32")
NEW = 6
END = 1  # the model's end token
FORM = 'input [ { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]\n'
VLLM = '{"enforce_eager": true, "kv_cache_memory_bytes": 268435456}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), steps=60)


@pytest.fixture(scope="module")
def right(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """Tokens with which ``generate`` continues each prompt, alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = {}
    for ids in prompts(64):
        asked = torch.tensor([ids])
        answer = model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=NEW, eos_token_id=None
        )
        found[tuple(ids)] = answer[0, len(ids) :].tolist()
    return found


@pytest.fixture(scope="module", params=["llm-onnx", *verified("llm-hf", "llm-vllm")])  # test_whole.py asks llm-hf
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def repository(engine: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for each dtype of ids; the request chooses the form."""
    home = tmp_path_factory.mktemp(engine)
    own = home / "project" / "models"
    if engine == "llm-onnx":
        add(home / "made", folder, "made", task="generate")
    for dtype in DTYPES:
        config = make_config(dtype, engine=engine).replace(f'"{engine}"', f'"{dtype}"') + FORM
        if engine == "llm-vllm":
            config = config.replace('"{}"', f"'{VLLM}'") + 'parameters { key: "threads" value { string_value: "1" } }\n'
        write(own / dtype / "config.pbtxt", config)
        shutil.copytree(ROOT / "models" / engine / "1", own / dtype / "1")
    environments = {dtype: find_vllm() for dtype in DTYPES} if engine == "llm-vllm" else {}
    weights = home / "made" / "models" / "made" / "1" if engine == "llm-onnx" else folder
    out = home / "repository"
    return compose([*DTYPES], out, projects=[home / "project"], weights=weights, environments=environments)


@pytest.fixture(scope="module")
def hosts(engine: str, repository: Path) -> Iterator[dict[str, Callable[[str, Any], Any]]]:
    """By name, what answers a request to the model of a dtype. vLLM runs in an environment of its own."""
    with ExitStack() as held:
        service = held.enter_context(Service(repository, repository.parent / "log"))
        found: dict[str, Callable[[str, Any], Any]] = {}
        for way in ("grpc", "http"):
            client = shoal.Client(getattr(service, way), protocol=way, retries=0, timeout=300)
            found[way] = held.enter_context(client).infer
        if engine != "llm-vllm":
            pipelines = {dtype: shoal.load(repository / dtype) for dtype in DTYPES}
            for pipeline in pipelines.values():
                held.callback(pipeline.close)
            found["local"] = lambda dtype, inputs: pipelines[dtype](**inputs)
        yield found


def test_single_requests(hosts: Any, right: dict[tuple[int, ...], list[int]]) -> None:
    for way, ask in hosts.items():
        for ids, tokens in list(right.items())[: 64 if way == "grpc" else 8]:
            answer = ask("INT32", stack([[*ids]], "INT32", NEW))
            assert answer["output_ids"].tolist() == [[tokens]], way


def test_each_row_is_the_single_request(
    engine: str, hosts: Any, right: dict[tuple[int, ...], list[int]], scale: Scale, record: Callable[..., None]
) -> None:
    """Four callers at a time, until the model's end token; a tenth of the requests have a bad row, which is named."""

    def call(index: int) -> tuple[int, bool]:
        draw = random.Random(index)
        rows, dtype, with_prompt = ROWS[index % 4], DTYPES[index // 4 % 2], bool(index // 8 % 2)
        way = [*hosts][index // 16 % len(hosts)]
        asked = draw.sample(prompts(64), rows)
        lengths = [draw.randint(1, NEW) for _ in asked]
        kind = np.dtype(dtype.lower())
        inputs = stack(asked, dtype, request_output_len=np.array(lengths, kind)[:, None])
        inputs |= {"exclude_input_in_output": np.full((rows, 1), not with_prompt)}
        inputs |= {"pad_id": np.full((rows, 1), 7, kind)}
        inputs.pop("end_id", None)
        if index % 10 == 9:
            bad = draw.randrange(rows)
            inputs["input_ids"][bad, 0] = 4000
            place = f"Row {bad}: " if rows > 1 else ""
            with pytest.raises(shoal.ShoalError, match=f"{place}input_ids has 4000 at place 0, and the model's vocab"):
                hosts[way](dtype, inputs)
            return 0, True
        answer = hosts[way](dtype, inputs)
        assert answer["output_ids"].dtype == kind
        for ids, length, row, size in zip(
            asked, lengths, answer["output_ids"], answer["sequence_length"][:, 0], strict=True
        ):
            new = [*right[tuple(ids)][:length], END]
            assert row[0, :size].tolist() == [*(ids if with_prompt else []), *new[: new.index(END)]], (way, index)
            assert set(row[0, size:].tolist()) <= {7}
        return rows, False

    number = scale(48, 200)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(number)))
    record(f"rows of {engine}", requests=number, rows=sum(rows for rows, _ in found),
           refused=sum(is_bad for _, is_bad in found), hosts=len(hosts))  # fmt: skip
