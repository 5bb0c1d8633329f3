"""Bad requests among good ones in Triton's dynamic batches: each gets its own answer, and no other."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as protocol

from shoal.clients.local import Pipeline
from shoal.serving.server.launch import Server
from tests.conftest import Scale, as_bytes
from tests.support.mutations import floats, with_lengths
from tests.support.wires import Answer, Attack, Wires, http

NEW = count()
NUM_GOOD = 11  # in a wave, beside a bad one
TOLERANCE = 1e-5  # in FP32; another batch size changes the encoder's last bits
OUTPUTS = ("SCORE", "BERT_SCORE", "FOREST_SCORE")
WORDS = ("The", "cat", "sat,", "nonetheless,", "on", "an", "epistemological", "mat;", "imperatively", "so")
PREFIX = "in ensemble 'ensemble_all', "
IN_RANGE = "it must lie between 0 and 1. Leave it out for the default."
SPLIT = "Split the text, or raise the max_text_bytes parameter in the model's config.pbtxt."


class Row(NamedTuple):
    """A request of one row, and the error that it must get, if it is a bad one."""

    text: bytes
    weight: float
    error: str = ""


BAD_TEXTS = (
    Row(
        b"A cat \xff", 0.5, f"{PREFIX}excerpt[0] is not valid UTF-8: byte 0xff at position 6. Encode the text as UTF-8."
    ),
    Row(b"a" * 65537, 0.5, f"{PREFIX}excerpt[0] has 65537 bytes; at most 65536 are allowed. {SPLIT}"),
)
BAD_WEIGHTS = (
    Row(b"A cat.", float("nan"), f"{PREFIX}BERT_WEIGHT[0] is nan; {IN_RANGE}"),
    Row(b"A cat.", -1.0, f"{PREFIX}BERT_WEIGHT[0] is -1; {IN_RANGE}"),
    Row(b"A cat.", 1.5, f"{PREFIX}BERT_WEIGHT[0] is 1.5; {IN_RANGE}"),
)


def good_rows(number: int) -> list[Row]:
    """Different texts of different lengths, each with a weight of its own."""
    return [Row(f"{' '.join(WORDS[: k % 9 + 1])} {k}.".encode(), k % 11 / 10) for k in range(number)]


def waves(good: list[Row]) -> Iterator[list[Row]]:
    """One bad request amid some good ones: at the first step in one wave, at the last in the next."""
    bad = cycle([BAD_TEXTS[0], BAD_WEIGHTS[0], BAD_TEXTS[1], *BAD_WEIGHTS[1:]])
    for start in range(0, len(good), NUM_GOOD):
        some = good[start : start + NUM_GOOD]
        yield [*some[: NUM_GOOD // 2], next(bad), *some[NUM_GOOD // 2 :]]


def blocker() -> Attack:
    """Work for the first step alone, of words that it has not seen: what arrives meanwhile becomes one batch."""
    texts = [" ".join(f"w{next(NEW)}" for _ in range(1000)).encode() for _ in range(8)]
    message = protocol.ModelInferRequest(model_name="preprocess")
    message.inputs.add(name="INPUT0", datatype="BYTES", shape=[8, 1])
    message.outputs.add(name="TREE_FEATS")
    message.raw_input_contents.append(with_lengths(*texts))
    return Attack(message.SerializeToString(), "ModelInfer")


def to_grpc(row: Row) -> Attack:
    message = protocol.ModelInferRequest(model_name="ensemble_all")
    message.inputs.add(name="excerpt", datatype="BYTES", shape=[1, 1])
    message.inputs.add(name="BERT_WEIGHT", datatype="FP32", shape=[1, 1])
    message.raw_input_contents.extend([with_lengths(row.text), floats(row.weight)])
    return Attack(message.SerializeToString(), "ModelInfer")


def to_http(row: Row) -> Attack:
    text = {
        "name": "excerpt",
        "shape": [1, 1],
        "datatype": "BYTES",
        "data": [row.text.decode(errors="surrogateescape")],
    }
    weight = {"name": "BERT_WEIGHT", "shape": [1, 1], "datatype": "FP32", "data": [row.weight]}
    body = json.dumps({"inputs": [text, weight]}, ensure_ascii=False).encode(errors="surrogateescape")
    return Attack(http("POST /v2/models/ensemble_all/infer", body))


def read_grpc(answer: Answer) -> list[float] | str:
    if answer.status != "OK":
        assert answer.status == "INVALID_ARGUMENT", answer
        return answer.body.decode()
    message = protocol.ModelInferResponse.FromString(answer.body)
    contents = zip(message.outputs, message.raw_output_contents, strict=True)
    return in_order({output.name: float(np.frombuffer(data, np.float32)[0]) for output, data in contents})


def read_http(answer: Answer) -> list[float] | str:
    body = json.loads(answer.body)
    if answer.status != "200":
        assert answer.status == "400", answer
        return str(body["error"])
    return in_order({output["name"]: output["data"][0] for output in body["outputs"]})


def in_order(outputs: dict[str, Any]) -> list[float]:
    return [outputs[name] for name in OUTPUTS]


Form = tuple[Callable[[Row], Attack], Callable[[Answer], list[float] | str]]
PROTOCOLS: dict[str, Form] = {"grpc": (to_grpc, read_grpc), "http": (to_http, read_http)}


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_bad_requests_do_not_affect_good_ones(
    name: str, server: Server, pipeline: Pipeline, scale: Scale, record: Callable[..., None]
) -> None:
    good = good_rows(scale(253, 5005))
    sent = list(waves(good))
    before = batch_counts(server)
    with Wires(server) as wires, ThreadPoolExecutor(NUM_GOOD + 2) as callers:
        answers = [answer for wave in sent for answer in send_wave(wave, PROTOCOLS[name], wires, callers)]
    batches = {model: number - before.get(model, 0) for model, number in batch_counts(server).items()}
    batches["preprocess"] -= len(sent)  # the blockers

    rows = [row for wave in sent for row in wave]
    wrong = [(row, answer) for row, answer in zip(rows, answers, strict=True) if row.error and answer != row.error]
    assert not wrong
    served = [answer for row, answer in zip(rows, answers, strict=True) if not row.error]
    difference = float(np.abs(np.array(served) - alone(pipeline, good)).max())
    assert difference <= TOLERANCE

    sizes = {model: round(len(rows) / batches[model], 1) for model in ("preprocess", "bert-large", "postprocess")}
    record(f"neighbours, {name}", good=len(good), bad=len(sent), max_diff=difference, mean_requests_a_batch=sizes)
    # At the first step wave and batch are one, but for stragglers: each has its bad request.
    assert sizes["preprocess"] > NUM_GOOD / 2, batches
    assert min(sizes.values()) > 1, batches


def send_wave(wave: list[Row], form: Form, wires: Wires, callers: ThreadPoolExecutor) -> list[list[float] | str]:
    """The answers, in order."""
    write, read = form
    blocked = callers.submit(wires.send, blocker())
    answers = list(callers.map(wires.send, map(write, wave)))
    assert blocked.result().status == "OK"
    return [read(answer) for answer in answers]


def alone(pipeline: Pipeline, good: list[Row]) -> Any:
    """Return this process's answer to each text alone."""
    parts = [pipeline(excerpt=as_bytes([row.text.decode()]), BERT_WEIGHT=[row.weight]) for row in good]
    return np.array([[part[name][0, 0] for name in OUTPUTS] for part in parts])


def batch_counts(server: Server) -> dict[str, int]:
    """Return the number of batches of each model, from the server's metrics."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'^nv_inference_exec_count\{model="([^"]+)",version="1"\} (\d+)', text, re.MULTILINE)
    return {model: int(number) for model, number in found}
