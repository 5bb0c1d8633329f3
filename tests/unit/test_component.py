"""Component in process and under the fake Triton: batching, errors, output checks, start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import shoal
from shoal.authoring.repository.loading import component_class
from shoal.errors import ArtifactError, InputError, ServerError, SetupError, ShoalError
from shoal.kit.component import tensors
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.spec import Array, Arrays, ModelSpec, TensorSpec
from shoal.kit.component.tensors import Device
from tests.support.fake_triton import InferenceRequest, Stub, Tensor, TritonError, TritonModelException

CONFIG: dict[str, Any] = {
    "name": "double",
    "max_batch_size": 8,
    "dynamic_batching": {},
    "input": [
        {"name": "X", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True},
        {"name": "BIAS", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
    ],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
    "parameters": {"answer": {"string_value": "good"}},
}


class Double(Component):
    """Doubles X; a 13 is bad input, a 66 breaks the whole batch, and the parameter `answer` spoils the output."""

    def setup(self, context: Context) -> None:
        self.answer = context.spec.parameters["answer"]
        self.shapes: list[tuple[int, ...]] = []

    def check(self, inputs: Arrays) -> None:
        if (inputs["X"] == 13).any():
            raise InputError("X holds 13.", "Give another number.")

    def run(self, batch: Arrays) -> Arrays:
        x = batch["X"]
        self.shapes.append(x.shape)
        if (x == 66).any():
            raise ZeroDivisionError("/secret/path")
        y = x * 2 + batch.get("BIAS", np.zeros((1, 1), np.float32))
        spoiled: dict[str, Any] = {
            "good": {"Y": y},
            "name": {"Z": y},
            "dtype": {"Y": y.astype(np.float64)},
            "shape": {"Y": y[:, :, None]},
            "rows": {"Y": y[:-1]},
            "list": {"Y": y.tolist()},
            "array": y,
        }
        return spoiled.get(self.answer)  # type: ignore[return-value]

    def close(self) -> None:
        self.shapes.clear()


def stub(folder: Path, **changes: Any) -> Stub:
    return Stub(Double, folder, {**CONFIG, **changes})


def rows(*values: list[float]) -> Array:
    return np.array(values, np.float32)


def answers(made: Stub, *requests: dict[str, Array]) -> list[Any]:
    return [r.error().message() if r.has_error() else r.arrays()["Y"].tolist() for r in made.infer(*requests)]


def test_requests_become_one_batch_and_part_again(tmp_path: Path) -> None:
    made = stub(tmp_path)
    assert answers(made, {"X": rows([1], [2])}, {"X": rows([3])}) == [[[2], [4]], [[6]]]
    assert made.batch_sizes == [2]


def test_ragged_requests_are_padded(tmp_path: Path) -> None:
    assert answers(stub(tmp_path), {"X": rows([1])}, {"X": rows([3, 4])}) == [[[2, 0]], [[6, 8]]]


def test_optional_inputs_split_the_batch(tmp_path: Path) -> None:
    made = stub(tmp_path)
    first, second = {"X": rows([1])}, {"X": rows([1]), "BIAS": rows([5])}
    assert answers(made, first, second, first) == [[[2]], [[7]], [[2]]]
    assert made.batch_sizes == [1, 1, 1]
    component = Double(Context(made.spec, tmp_path))
    outputs = component.process([first, second, first])
    assert [o["Y"].tolist() for o in outputs if not isinstance(o, ShoalError)] == [[[2]], [[7]], [[2]]]


def test_bad_input_fails_alone(tmp_path: Path) -> None:
    made = stub(tmp_path)
    bad, good = {"X": rows([13])}, {"X": rows([1])}
    assert answers(made, good, bad, good) == [[[2]], "X holds 13. Give another number.", [[2]]]
    error = made.infer(bad)[0].error()
    assert error is not None
    assert error.code() == TritonError.INVALID_ARG


def test_a_request_that_breaks_the_batch_fails_alone_and_tells_no_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    got = answers(stub(tmp_path), {"X": rows([1])}, {"X": rows([66])}, {"X": rows([2])})
    assert got[0] == [[2]]
    assert got[2] == [[4]]
    assert got[1] == "Model double failed on this request (ZeroDivisionError). See the server's log."
    assert "/secret/path" in caplog.text


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("name", "Model double gave outputs ['Z'], its config declares ['Y']."),
        ("dtype", "Output Y has dtype float64, expected float32 (TYPE_FP32), as the config of model double declares."),
        ("shape", "Output Y has shape [1, 1, 1], expected [rows, -1], as the config of model double declares."),
        ("rows", "Output Y of model double has 0 rows for 1 rows in."),
        ("list", "Output Y of model double is a list, not an array."),
        ("none", 'run of model double returned None. It has to return a dict of outputs: {"Y": array}'),
        ("array", 'run of model double returned a ndarray. It has to return a dict of outputs: {"Y": array}'),
    ],
)
def test_outputs_are_checked(tmp_path: Path, answer: str, message: str) -> None:
    made = stub(tmp_path, parameters={"answer": {"string_value": answer}})
    assert answers(made, {"X": rows([1])}) == [message]


def test_models_that_do_not_batch_get_one_request_a_call(tmp_path: Path) -> None:
    context = Context(ModelSpec.from_config({**CONFIG, "max_batch_size": 0}), tmp_path)
    component = Double(context)
    outputs = component.process([{"X": rows([1])[0]}, {"X": rows([2])[0]}])
    assert component.shapes == [(1,), (1,)]
    assert all(isinstance(o, ShoalError) for o in outputs)  # Y comes out [1, 1], which dims [-1] without a batch is not


def test_requests_without_a_required_input_fail_alone(tmp_path: Path) -> None:
    """Triton compares numbers of inputs, not names, where one is optional."""
    message = "Input X of model double is missing. Send it: TYPE_FP32."
    assert answers(stub(tmp_path), {"X": rows([1])}, {"BIAS": rows([5])}) == [[[2]], message]


def test_requests_of_no_rows_fail_alone(tmp_path: Path) -> None:
    """Triton strips their batch dimension and lets them in; 2^32 rows are 0 to it, too."""
    good, rowless = {"X": rows([1])}, {"X": rows([1])[0]}
    message = "Input X has shape [1], expected [rows, -1], as the config of model double declares. Send 1 row or more."
    made = stub(tmp_path)
    assert answers(made, good, rowless, good) == [[[2]], message, [[2]]]
    error = made.infer(rowless)[0].error()
    assert error is not None
    assert error.code() == TritonError.INVALID_ARG


def test_unreadable_requests_fail_alone(tmp_path: Path) -> None:
    good = InferenceRequest([Tensor("X", rows([1]))])
    unreadable = InferenceRequest([Tensor("X", np.array([[b"a"]], np.object_), is_on_gpu=True)])
    first, second, third = stub(tmp_path).infer(good, unreadable, good)
    assert first.arrays()["Y"].tolist() == third.arrays()["Y"].tolist() == [[2]]
    assert second.has_error()
    assert second.error().message().startswith("Model double failed on this request (")


def test_answers_that_cannot_be_sent_fail_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = tensors.make_response

    def choosy(answer: Any) -> Any:
        if not isinstance(answer, ShoalError) and answer["Y"][0, 0] == 4:
            raise ValueError("/secret/path")
        return send(answer)

    monkeypatch.setattr(tensors, "make_response", choosy)
    got = answers(stub(tmp_path), {"X": rows([1])}, {"X": rows([2])})
    assert got == [[[2]], "Model double failed on this request (ValueError). See the server's log."]


def test_finalize_closes(tmp_path: Path) -> None:
    made = stub(tmp_path)
    answers(made, {"X": rows([1])})
    made.finalize()


def test_readiness_while_a_model_loads_serves_fails_and_is_unloaded(tmp_path: Path) -> None:
    """Triton asks from release 26.03 on."""
    seen: list[bool] = []
    model: Any = None

    class Watched(Double):
        is_well = True

        def setup(self, context: Context) -> None:  # noqa: ARG002
            seen.append(model.is_ready())

        def is_ready(self) -> bool:
            return self.is_well

        def close(self) -> None:
            seen.append(model.is_ready())

    class Model(Watched.for_triton()):  # type: ignore[misc]
        def __init__(self) -> None:
            nonlocal model
            model = self

    Watched.for_triton = classmethod(lambda cls: Model)  # type: ignore[method-assign, assignment]
    made = Stub(Watched, tmp_path, CONFIG)
    seen.append(model.is_ready())
    model.component.is_well = False
    seen.append(model.is_ready())
    model.component.is_well = True
    made.finalize()
    assert seen == [False, True, False, False]
    assert not model.is_ready()


def test_errors_have_codes(tmp_path: Path) -> None:
    class Failing(Double):
        def run(self, batch: Arrays) -> Arrays:
            raise ServerError("The other server is gone.") if batch["X"][0, 0] else ArtifactError("Lost.")

    made = Stub(Failing, tmp_path, CONFIG)
    first, second = (made.infer({"X": rows([x])})[0].error() for x in (1, 0))
    assert first is not None
    assert second is not None
    assert (first.code(), second.code()) == (TritonError.UNAVAILABLE, TritonError.INTERNAL)
    assert first.message() == "The other server is gone."
    assert "Lost" not in second.message()  # such messages name paths


def test_run_must_be_defined(tmp_path: Path) -> None:
    component = Component(Context(ModelSpec.from_config(CONFIG), tmp_path))
    with pytest.raises(NotImplementedError, match="Component must define run"):
        component.run({})


def test_a_response_that_is_missing_is_what_the_fake_refuses(tmp_path: Path) -> None:
    made = stub(tmp_path)
    made._model.execute = lambda requests: None  # type: ignore[assignment, return-value]
    with pytest.raises(TritonModelException, match="waits for ever"):
        made.infer({"X": rows([1])})


# --- start -------------------------------------------------------------------------------------------------------


def test_self_test_refuses_a_stub_that_corrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of 24.10's stub under NumPy 2: strides read as 0, so every element is the first."""

    def corrupted(self: Tensor) -> Any:
        return np.broadcast_to(self._array.ravel()[:1], self._array.shape)

    monkeypatch.setattr(Tensor, "as_numpy", corrupted)
    with pytest.raises(SetupError, match=r"This stub corrupts TYPE_BOOL tensors under NumPy .* Use numpy<2"):
        stub(tmp_path)


def test_self_test_takes_a_failing_call_for_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, source: Any) -> Tensor:
        raise ValueError(f"{name}: {source}")

    monkeypatch.setattr(Tensor, "from_dlpack", staticmethod(broken))
    with pytest.raises(SetupError, match="corrupts TYPE_BOOL"):
        stub(tmp_path)


def test_a_foreign_copy_of_the_package_is_refused(tmp_path: Path) -> None:
    version = tmp_path / "preprocess" / "1"
    shutil.copytree(Path(shoal.__file__).parents[2] / "postprocess" / "readability" / "1", version)
    (version / "shoal").mkdir()
    model = component_class(version / "model.py")
    with pytest.raises(SetupError, match=r"contains its own copy of shoal, but the one in .* was imported"):
        Stub(model, version.parent, {**CONFIG, "name": "preprocess"})


def test_missing_artifact_is_named(tmp_path: Path) -> None:
    context = Context(ModelSpec.from_config(CONFIG), tmp_path)
    with pytest.raises(ArtifactError, match=r"Model double misses its artifact model\.pt"):
        context.artifact("model.pt")


def test_threads_are_shared_among_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for groups, parameters, expected in (
        ([], {}, 8),
        ([{"count": 3}, {}], {}, 2),
        ([{"count": 16}], {}, 1),
        ([], {"threads": {"string_value": "5"}}, 5),
    ):
        made = stub(tmp_path, instance_group=groups, parameters={**CONFIG["parameters"], **parameters})
        assert made._model.component.context.num_threads == expected


def test_device_of_an_instance() -> None:
    assert Device.from_triton({"model_instance_kind": "GPU", "model_instance_device_id": "3"}) == Device("gpu", 3)
    assert Device.from_triton({"model_instance_kind": "CPU", "model_instance_device_id": "0"}) == Device()


def test_unknown_dtypes_are_named() -> None:
    spec = TensorSpec("X", "TYPE_BF16", (1,))
    with pytest.raises(InputError, match="Tensor X has data type TYPE_BF16, which has no NumPy form"):
        assert spec.numpy_dtype


def test_the_requests_of_a_stateful_component_run_once_each_in_order(tmp_path: Path) -> None:
    """A batch that fails is run again request by request, which would change the state twice."""

    class Sum(Component):
        is_stateful = True
        seen: ClassVar[list[float]] = []

        def run(self, batch: Arrays) -> Arrays:
            self.seen.append(float(batch["X"][0, 0]))
            if batch["X"][0, 0] == 2:
                raise ValueError
            return {"Y": batch["X"]}

    first, second, third = Stub(Sum, tmp_path, CONFIG).infer(*({"X": rows([x])} for x in (1, 2, 3)))
    assert Sum.seen == [1, 2, 3]
    assert second.has_error()
    assert (first.arrays()["Y"].item(), third.arrays()["Y"].item()) == (1, 3)
