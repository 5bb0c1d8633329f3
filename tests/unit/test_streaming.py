"""Streaming components in process and under the fake Triton: answers, ends, errors, leaving, other models."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format

import shoal
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.loading import component_class
from shoal.errors import InputError, SetupError, ShoalError
from shoal.kit.component.context import Context
from shoal.kit.component.spec import ModelSpec
from shoal.kit.component.streaming import StreamingComponent
from tests.support import fake_triton
from tests.support.counting import write_counting, write_model
from tests.support.fake_triton import InferenceRequest, InferenceResponse, Stub, Tensor


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_counting(tmp_path / "repository", tmp_path / "left")


@pytest.fixture
def stub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Stub]]:
    """Starts models of the repository under the fake Triton, where they know each other."""
    made: dict[str, Stub] = {}
    monkeypatch.setattr(fake_triton, "known_models", made)
    monkeypatch.setattr(fake_triton, "deaths", deaths := list[str]())

    def start(name: str) -> Stub:
        config = json_format.MessageToDict(read_config(repository / name).message, preserving_proto_field_name=True)
        made[name] = Stub(component_class(repository / name / "1" / "model.py"), repository / name, config)
        return made[name]

    with fake_triton.installed():
        yield start
        for each in made.values():
            each.finalize()
        time.sleep(0.1)  # for their threads, which see the ends
    assert not deaths


def request(count: int, *, rows: bool = True, request_id: str = "", **more: float) -> InferenceRequest:
    given: dict[str, Any] = {"COUNT": np.int32(count)}
    given |= {name: np.float32(x) if name == "DELAY" else np.int32(x) for name, x in more.items()}
    shape = (1, 1) if rows else (1,)
    return InferenceRequest([Tensor(name, np.full(shape, x)) for name, x in given.items()], request_id)


def read(responses: Iterator[InferenceResponse]) -> list[Any]:
    """The numbers, and an error's text."""
    return [r.error().message() if r.has_error() else int(r.output_tensors()[0].as_numpy().item()) for r in responses]


MODELS = [("count", False), ("engine", True), ("count_bls", True)]


@pytest.mark.parametrize(("name", "rows"), MODELS)
def test_each_way_of_answering(name: str, rows: bool, stub: Callable[[str], Stub]) -> None:
    stub("engine")
    model = stub(name)
    for count in (0, 1, 50):
        assert read(model.stream(request(count, rows=rows))) == list(range(count))
    assert read(model.stream(request(3, rows=rows, FAIL_AT=0))) == ["It failed at 0."]
    assert read(model.stream(request(9, rows=rows, FAIL_AT=3))) == [0, 1, 2, "It failed at 3."]
    *first, error = read(model.stream(request(9, rows=rows, WRONG_AT=2)))
    assert first == [0, 1]
    assert error.startswith("Output NUMBER has shape [")
    assert read(model.stream(request(2, rows=rows))) == [0, 1]  # others are not affected


def test_a_refused_request_never_starts(stub: Callable[[str], Stub]) -> None:
    assert read(stub("count").stream(request(-1, rows=False))) == ["COUNT is negative. Give 0 or more."]


@pytest.mark.parametrize(("name", "rows"), MODELS)
def test_a_client_that_leaves(name: str, rows: bool, stub: Callable[[str], Stub], tmp_path: Path) -> None:
    stub("engine")
    model, asked = stub(name), request(1000, rows=rows, DELAY=0.01)
    answers = model.stream(asked)
    assert read(iter([next(answers), next(answers)])) == [0, 1]
    asked.has_gone = True
    start = time.monotonic()
    assert len(list(answers)) < 100
    assert time.monotonic() - start < 5
    wait_for(lambda: (tmp_path / "left").is_file())


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("name", "rows"), MODELS[:2])
def test_a_stop_request_ends_the_one_of_its_id(name: str, rows: bool, stub: Callable[[str], Stub]) -> None:
    model = stub(name)
    answers = model.stream(request(1000, rows=rows, DELAY=0.01, request_id="a"))
    other = model.stream(request(20, rows=rows, DELAY=0.01, request_id="b"))
    next(answers)

    def stop(request_id: str) -> list[Any]:
        asked = request(0, rows=rows, request_id=request_id)
        asked.tensors = [*asked.tensors, Tensor("stop", np.ones((1, 1) if rows else (1,), np.bool_))]
        return read(model.stream(asked))

    assert stop("a") == []
    assert len(list(answers)) < 100
    assert read(other) == list(range(20))
    assert stop("never") == []
    assert stop("") == ["A request with stop has no request id. Send it with the id of the request to stop."]


class Named(StreamingComponent):
    """Ends as the parameter says."""

    def answers(self, _: Any, stream: Any) -> Any:
        number = {"NUMBER": np.zeros(1, np.int32)}
        assert stream.send(number)
        stream.end()
        stream.end(ValueError("too late"))
        assert not stream.send(number)
        return [number]  # a list is one kind of iterable


def make(component: type[StreamingComponent], folder: Path) -> StreamingComponent:
    write_model(folder / "m", "Count")
    return component(Context(read_config(folder / "m").spec, folder / "m" / "1"))


def test_answers_are_dicts(tmp_path: Path) -> None:
    class Numbers(StreamingComponent):
        def answers(self, *_: Any) -> Any:
            yield None

    with pytest.raises(ShoalError, match=r"^answers of model m yielded None\. It has to yield a dict of outputs: \{"):
        list(make(Numbers, tmp_path).stream({"COUNT": np.ones(1, np.int32)}))


def test_answers_after_the_end_are_not_sent(tmp_path: Path) -> None:
    answers = make(Named, tmp_path).stream({"COUNT": np.ones(1, np.int32)})
    assert len(list(answers)) == 1
    assert not answers.is_open
    assert not answers.has_left


def test_paths_of_the_server_stay_in_its_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(StreamingComponent):
        def open(self, *_: Any) -> None:
            raise OSError("/secret/path")

    with pytest.raises(ShoalError, match=r"^Model m failed on this request \(OSError\)\. See the server's log\.$"):
        list(make(Broken, tmp_path).stream({"COUNT": np.ones(1, np.int32)}))
    assert "/secret/path" in caplog.text


def test_inputs_may_be_kept(tmp_path: Path) -> None:
    kept: list[Any] = []

    class Keeper(StreamingComponent):
        def open(self, inputs: Any, stream: Any) -> None:
            kept.append(inputs["COUNT"])
            stream.end()

    given = np.ones(1, np.int32)
    assert not list(make(Keeper, tmp_path).stream({"COUNT": given}))
    given[:] = 7
    assert kept[0] == [1]


def test_a_config_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    spec = ModelSpec("m", (), ())
    with pytest.raises(
        SetupError,
        match=r"Named answers a request in pieces, but the config\.pbtxt of model m is not decoupled\. Add model_",
    ):
        Named(Context(spec, tmp_path))


# --- in this process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "output", "first"), [("count", "NUMBER", 0), ("count_all", "SUM", 10), ("count_bls", "NUMBER", 0)]
)
def test_in_this_process(name: str, output: str, first: int, repository: Path, tmp_path: Path) -> None:
    rows = [[3]] if name != "count" else [3]
    extra = 1 if name == "count_all" else 0
    more = {"DELAY": 0, "FAIL_AT": -1, "WRONG_AT": -1}
    with shoal.load(repository / name) as pipeline:

        def ask(count: int, **given: float) -> Any:
            values = {**more, **given, "COUNT": count - extra}
            return pipeline.stream(**{key: [x] if name == "count" else [[x]] for key, x in values.items()})

        for count in (0, 1, 5) if not extra else (1, 5):
            assert [answer[output].item() for answer in ask(count)] == list(range(first, first + count))
        with pytest.raises(InputError, match=r"answers in pieces\. Use stream"):
            pipeline(COUNT=rows)
        answers = ask(5, FAIL_AT=2)
        assert [next(answers)[output].item(), next(answers)[output].item()] == [first, first + 1]
        with pytest.raises(InputError, match="It failed at 2"):
            next(answers)
        answers = ask(1000, DELAY=0.01)
        next(answers)
        answers.close()
        wait_for(lambda: (tmp_path / "left").is_file())


@pytest.mark.parametrize("base", ["Component", "StreamingComponent"])
def test_an_input_that_is_also_an_output_may_be_left_out(base: str, tmp_path: Path) -> None:
    """An example is an engine's carry. If it is given, the component's own output is the answer, not the input."""
    code = f"""
import numpy as np
from shoal import {base}

class Echo({base}):
    def run(self, batch):
        return {{"N": batch["N"] + 1, "carry": batch.get("carry", np.full_like(batch["N"], 7)) * 2}}

    def answers(self, inputs, stream):
        yield self.run(inputs)
        yield self.run(inputs)

TritonPythonModel = Echo.for_triton()
"""
    policy = "model_transaction_policy { decoupled: true }" if base == "StreamingComponent" else ""
    tensor = "data_type: TYPE_INT32 dims: [ 1 ]"
    config = f"""
backend: "python" max_batch_size: 1 {policy}
input [ {{ name: "N" {tensor} }}, {{ name: "carry" {tensor} optional: true }} ]
output [ {{ name: "N" {tensor} }}, {{ name: "carry" {tensor} }} ]
"""
    folder = tmp_path / "echo"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code, encoding="utf-8")
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    with shoal.load(folder) as pipeline:

        def ask(**inputs: Any) -> list[tuple[int, int]]:
            answers = pipeline.stream(**inputs) if pipeline.is_decoupled else [pipeline(**inputs)]
            return [(answer["N"].item(), answer["carry"].item()) for answer in answers]

        number = 2 if pipeline.is_decoupled else 1
        assert ask(N=[[3]]) == number * [(4, 14)]
        assert ask(N=[[3]], carry=[[5]]) == number * [(4, 10)]
        assert {edge.source for edge in pipeline.graph.edges() if edge.target is not None} == {None}


def test_threads_may_share_a_pipeline(repository: Path) -> None:
    found: dict[int, list[int]] = {}
    with shoal.load(repository / "count_all") as pipeline:

        def ask(count: int) -> None:
            given = {"COUNT": [[count]], "DELAY": [[0.001]], "FAIL_AT": [[-1]], "WRONG_AT": [[-1]]}
            found[count] = [answer["SUM"].item() for answer in pipeline.stream(**given)]

        threads = [threading.Thread(target=ask, args=[count]) for count in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {count: list(range(10, 11 + count)) for count in range(30)}
    assert json.dumps(found[0]) == "[10]"


def test_a_model_that_cannot_be_asked(
    stub: Callable[[str], Stub], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not there; or ``calls`` does not list it, which is the code's fault, and is only logged."""
    asking = stub("count_bls")
    assert read(asking.stream(request(1))) == [
        "Model engine cannot be asked: Failed for execute the inference request. Model 'engine' is not ready."
    ]
    component = make(Named, tmp_path)
    with pytest.raises(SetupError, match=r"calls model nobody, which the parameter calls does not list\. Known: none"):
        component.context.models.infer("nobody", {})
    assert "nobody" not in caplog.text
