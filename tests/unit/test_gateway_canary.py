"""Canary requests: which models get one, what it holds, and what an answer says of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.clients.client.failures import CallError, Kind
from shoal.errors import ArtifactError
from shoal.serving.gateway.control.canary import (
    MOST_SECONDS,
    SECONDS,
    SHARE,
    Canary,
    Verdict,
    WrongError,
    make_canaries,
)
from tests.support.configs import DECOUPLED, ENGINE, PYTHON, chain, make_configs, parameter
from tests.support.fake_upstream import FakeClient
from tests.support.virtual_time import run

ONE = {"X": np.ones((1, 1), np.float32)}


def warmup(dtype: str = "TYPE_FP32", data: str = "zero_data: true") -> str:
    """Text of a warm-up request."""
    entry = f'inputs {{ key: "X" value {{ data_type: {dtype} dims: [ 1 ] {data} }} }}'
    return f'model_warmup [ {{ name: "one" batch_size: 1 {entry} }} ]\n'


def fails(kind: Kind, message: str = "") -> Callable[[Any], Any]:
    def answer(_: Any) -> Any:
        raise CallError(kind, message)

    return answer


def gives(**outputs: Any) -> Callable[[Any], Any]:
    return lambda _: {name: np.asarray(value) for name, value in outputs.items()}


async def verdict(canary: Canary, answer: Callable[[Any], Any]) -> Verdict | None:
    try:
        await canary.ask(FakeClient(answer))  # type: ignore[arg-type]
    except WrongError as error:
        return error.verdict
    finally:
        assert canary.sent == 0.0
    return None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"Y": [1.0, np.nan]}, None),
        ({"Y": [1.02, np.nan]}, None),
        ({"Y": [1.1, np.nan]}, Verdict.WRONG),
        ({"Y": [1.0, 0.0]}, Verdict.WRONG),
        ({"Y": [1.0, np.nan], "more": 1}, None),
        ({"other": [1.0, np.nan]}, Verdict.WRONG),
        ({"Y": [[1.0, np.nan]]}, Verdict.WRONG),
        ({"Y": np.array([1.0, np.nan], np.float32)}, Verdict.WRONG),
        ({"Y": [1.0, np.nan, 0.0]}, Verdict.WRONG),
        ({"Y": [1.0]}, Verdict.WRONG),
    ],
)
def test_answers_are_compared_with_the_first(given: dict[str, Any], expected: Verdict | None) -> None:
    async def work() -> None:
        canary = Canary("m", ONE)
        assert await verdict(canary, gives(Y=[1.0, np.nan])) is None
        assert await verdict(canary, gives(**given)) is expected

    run(work())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"IDS": [[7, 8, 0, 0]]}, None),  # in a batch with a longer row
        ({"IDS": [[7, 9, 0, 0]]}, Verdict.WRONG),
        ({"IDS": [[7]]}, Verdict.WRONG),
        ({"IDS": [[7, 8], [7, 8]]}, Verdict.WRONG),
        ({"Y": [[1, 1]]}, Verdict.WRONG),  # of dims [1]
    ],
)
def test_an_output_of_variable_width_may_be_padded(given: dict[str, Any], expected: Verdict | None) -> None:
    ids = 'output [ { name: "IDS" data_type: TYPE_INT64 dims: [ -1 ] } ]\n'
    canary = make_canaries(make_configs(m=PYTHON + ids + warmup()))["m"]

    async def work() -> None:
        assert await verdict(canary, gives(IDS=[[7, 8]], Y=[[1]])) is None
        assert await verdict(canary, gives(**{"IDS": [[7, 8]], "Y": [[1]], **given})) is expected

    run(work())


def test_integers_are_compared_exactly() -> None:
    async def work() -> None:
        canary = Canary("m", ONE)
        assert [await verdict(canary, gives(Y=value)) for value in (1000, 1000, 1001)] == [None, None, Verdict.WRONG]

    run(work())


@pytest.mark.parametrize(
    ("kind", "message", "expected"),
    [
        (Kind.UNREACHABLE, "", Verdict.GONE),
        (Kind.CONNECTION_LOST, "", Verdict.GONE),
        (Kind.FAILED, "Stub process 'm_0_0' is not healthy.", Verdict.GONE),
        (Kind.FAILED, "it raised", Verdict.FAILED),
        (Kind.BUSY, "Exceeds maximum queue size", Verdict.BUSY),
        (Kind.BUSY, "not ready", Verdict.FAILED),
        (Kind.TIMEOUT, "", Verdict.LATE),
    ],
)
def test_errors_are_diagnosed(kind: Kind, message: str, expected: Verdict) -> None:
    async def work() -> None:
        canary = Canary("m", ONE)
        assert await verdict(canary, fails(kind, message)) is expected
        assert (canary.expected, canary.latency) == ({}, 0.0)

    run(work())


def test_the_pause_follows_the_shortest_latency() -> None:
    async def work() -> None:
        canary, seconds = Canary("m", ONE), [0.0]

        class Client(FakeClient):
            async def send(self, call: Any, _: float) -> Any:
                assert (call.model, call.request_id, call.arrays) == ("m", "canary", ONE)
                start = asyncio.get_running_loop().time()
                assert canary.sent == start
                await asyncio.sleep(seconds[0])
                return {"Y": np.array(1)}

        client: Any = Client(gives())
        assert canary.period == MOST_SECONDS
        for latency, period in ((0.4, 0.4 / SHARE), (5.0, 0.4 / SHARE), (0.001, SECONDS)):
            seconds[0] = latency
            await canary.ask(client)
            assert (canary.latency, canary.period) == pytest.approx((latency, period))

    run(work())


def test_all_answers_of_a_decoupled_model_count() -> None:
    async def work() -> None:
        canary = Canary("m", ONE, is_decoupled=True)
        two: Any = [{"Y": np.array(1)}, {"Y": np.array(2)}]
        assert await verdict(canary, lambda _: two) is None
        assert canary.expected == {"Y of answer 0": 1, "Y of answer 1": 2, "number of answers": 2}
        assert await verdict(canary, lambda _: two) is None
        assert await verdict(canary, lambda _: two[:1]) is Verdict.WRONG
        assert await verdict(canary, lambda _: [*two, {}]) is Verdict.WRONG
        assert await verdict(canary, lambda _: two[::-1]) is Verdict.WRONG

    run(work())


def test_models_get_a_canary_from_their_warm_up(tmp_path: Path) -> None:
    data = tmp_path / "data" / "warmup" / "X"
    data.parent.mkdir(parents=True)
    data.write_bytes(np.array([3], np.float32).tobytes())
    text = PYTHON.replace("TYPE_FP32", "TYPE_STRING", 1)
    configs = make_configs(
        tmp_path,
        data=PYTHON + warmup(data='input_data_file: "X"'),
        zeros=PYTHON + warmup(data="random_data: true"),
        unbatched=PYTHON.replace("max_batch_size: 4", "") + warmup(),
        text=text + warmup("TYPE_STRING"),
        bf16=PYTHON + warmup("TYPE_BF16"),
        none=PYTHON,
        chain=chain("data", "zeros"),
    )
    found = {name: canary.inputs["X"].tolist() for name, canary in make_canaries(configs).items()}
    assert found.pop("chain") is not None
    assert found == {"data": [[3.0]], "zeros": [[0.0]], "unbatched": [0.0], "text": [[b""]]}


@pytest.mark.parametrize(("dtype", "content"), [("TYPE_FP32", None), ("TYPE_FP32", b"123"), ("TYPE_STRING", b"1")])
def test_a_warm_up_whose_data_do_not_fit(dtype: str, content: bytes | None, tmp_path: Path) -> None:
    data = tmp_path / "data" / "warmup" / "X"
    data.parent.mkdir(parents=True)
    if content is not None:
        data.write_bytes(content)
    configs = make_configs(tmp_path, data=PYTHON + warmup(dtype, 'input_data_file: "X"'))
    with pytest.raises(ArtifactError, match=r"^data/warmup/X does not fit input X: .*Run shoal check"):
        make_canaries(configs)


def test_a_decoupled_model_gets_the_canary_of_its_parameter() -> None:
    given = {"PROMPT": [["a", "b"]]}
    texts = {
        "without": ENGINE + warmup(),
        "given": ENGINE + parameter("canary", str(given).replace("'", '\\"')),
        "over": chain("none", "without"),
        "none": PYTHON,
    }
    canaries = make_canaries(make_configs(Path(), **texts))
    assert list(canaries) == ["given"]
    assert canaries["given"].is_decoupled
    assert canaries["given"].inputs["PROMPT"].tolist() == [[b"a", b"b"]]
    wrong = PYTHON + DECOUPLED + parameter("canary", '{\\"X\\": \\"text\\"}')
    with pytest.raises(ArtifactError, match="Parameter canary of model wrong does not fit its inputs"):
        make_canaries(make_configs(wrong=wrong))


def test_an_ensemble_with_inputs_that_cannot_be_made_gets_none() -> None:
    both = chain("a", "a")
    assert make_canaries(make_configs(a=PYTHON, both=both))["both"].inputs.keys() == {"X"}
    assert not make_canaries(make_configs(a=PYTHON, both=both.replace("dims: [ 1 ]", "dims: [ -1 ]", 1)))
