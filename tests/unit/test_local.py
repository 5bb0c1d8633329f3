"""Pipelines in this process, and what callers may give."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.repository.loading import component_class
from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.calls import Call, Description, check_outputs, find_text_input, to_arrays
from shoal.clients.client.client import Client
from shoal.clients.client.flow import merge
from shoal.clients.local import Pipeline, load
from shoal.errors import ArtifactError, InputError
from shoal.kit.component.hosted import HostedModel
from shoal.kit.component.spec import ModelSpec, TensorSpec
from tests.support.once import ROOT

TEXT = TensorSpec("excerpt", "TYPE_STRING", (1,))
WEIGHT = TensorSpec("WEIGHT", "TYPE_FP32", (1,), is_optional=True)
VECTOR = TensorSpec("V", "TYPE_INT64", (-1,))
PROMPT, WORDS = TensorSpec("prompt", "TYPE_STRING", (-1,)), TensorSpec("stop", "TYPE_STRING", (-1,), is_optional=True)


def convert(*specs: TensorSpec, **values: Any) -> Any:
    return to_arrays(specs, values, is_batched=True)


# --- arrays ------------------------------------------------------------------------------------------------------


def test_lists_become_the_declared_arrays() -> None:
    arrays = convert(TEXT, WEIGHT, excerpt=["é", b"b"], WEIGHT=[0, 1])
    assert arrays["excerpt"].tolist() == [["é".encode()], [b"b"]]
    assert arrays["WEIGHT"].dtype == np.float32
    assert arrays["WEIGHT"].shape == (2, 1)
    assert convert(TEXT, WEIGHT, excerpt=[["a"]], WEIGHT=None).keys() == {"excerpt"}
    assert convert(VECTOR, V=[[1, 2, 3]])["V"].tolist() == [[1, 2, 3]]
    assert convert(TEXT, excerpt="a")["excerpt"].tolist() == [[b"a"]]  # a single text is one row
    assert convert(PROMPT, prompt=["a", "b"])["prompt"].tolist() == [[b"a"], [b"b"]]  # as some models declare a text
    with pytest.raises(InputError, match=r"Input stop has shape \[2\], expected \[rows, -1\]"):
        convert(PROMPT, WORDS, prompt=["a", "b"], stop=["c", "d"])


def test_the_input_that_takes_a_text_alone() -> None:
    for inputs, name in (
        ((TEXT, WEIGHT), "excerpt"), ((PROMPT, WORDS), "prompt"), ((TEXT, PROMPT), "excerpt"), ((WORDS,), ""),
        ((PROMPT, replace(PROMPT, name="other")), ""), ((VECTOR,), ""),
    ):  # fmt: skip
        assert find_text_input(ModelSpec("m", inputs, ())) == name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "The input excerpt is missing. Give excerpt=[...]."),
        ({"excerpt": ["a"], "words": [1]}, "There is no input words. Inputs: excerpt, WEIGHT."),
        ({"excerpt": ["a", 3]}, "excerpt[1] is 3; it must be a string. Give str or UTF-8 bytes."),
        ({"excerpt": ["a", float("nan")]}, "excerpt[1] is nan; it must be a string. Fill what is missing"),
        (
            {"excerpt": ["a", np.ones(2)]},
            "excerpt[1] is array([1., 1.]); it must be a string. Give str or UTF-8 bytes.",
        ),
        ({"excerpt": ["a\ud800"]}, "excerpt[0] holds the lone surrogate U+D800 at position 1."),
        ({"excerpt": []}, "The request has no rows. Give at least one."),
        ({"excerpt": ["a"], "WEIGHT": [1, 1]}, "The inputs have different numbers of rows: excerpt 1, WEIGHT 2."),
        ({"excerpt": ["a"], "WEIGHT": ["x"]}, "WEIGHT cannot be read as TYPE_FP32: 'x' is not a number"),
        (
            {"excerpt": ["a"], "WEIGHT": np.ones(1, np.int64)},
            'Input WEIGHT has dtype int64, expected float32 (TYPE_FP32). Convert it: array.astype("float32")',
        ),
        (
            {"excerpt": ["a"], "WEIGHT": np.ones(1, np.uint8)},
            'Input WEIGHT has dtype uint8, expected float32 (TYPE_FP32). Convert it: array.astype("float32")',
        ),
        ({"excerpt": ["a"], "WEIGHT": [[1, 2]]}, "Input WEIGHT has shape [1, 2], expected [rows, 1]."),
        ({"excerpt": ["a"], "WEIGHT": 1}, "Input WEIGHT has shape [], expected [rows, 1]."),
    ],
)
def test_values_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        convert(TEXT, WEIGHT, **values)
    assert str(error.value).startswith(message)


class Column(list[Any]):
    """A column as of pandas: its elements are lists, or numbers of another dtype."""

    def to_numpy(self) -> Any:
        """Return the elements as an array."""
        array = np.empty(len(self), np.object_)
        array[:] = self
        return array if isinstance(self[0], list | str) else np.asarray([*self], np.float64)


class Frame(dict[str, Column]):
    """A data frame, which is no mapping in pandas either: its truth value is ambiguous."""

    columns = property(lambda self: [*self.keys()])
    dtypes = property(lambda self: [])

    def __bool__(self) -> bool:
        raise ValueError("The truth value of a DataFrame is ambiguous.")


def test_columns_of_data_frames_are_inputs() -> None:
    frame = Frame(excerpt=Column(["a", "b"]), WEIGHT=Column([0.5, 1.0]))
    arrays = convert(TEXT, WEIGHT, **merge(frame, {}, (TEXT, WEIGHT)))
    assert (arrays["excerpt"].tolist(), arrays["WEIGHT"].tolist()) == ([[b"a"], [b"b"]], [[0.5], [1.0]])
    assert arrays["WEIGHT"].dtype == np.float32
    assert convert(VECTOR, V=Column([[1, 2], [3, 4]]))["V"].tolist() == [[1, 2], [3, 4]]


def test_names_in_another_case_are_suggested() -> None:
    with pytest.raises(InputError, match=r"^There is no input EXCERPT\. Did you mean excerpt\?$"):
        convert(TEXT, EXCERPT=["a"])
    with pytest.raises(InputError, match=r"^There is no output score\. Did you mean SCORE\?$"):
        check_outputs(["score"], ["SCORE", "LABEL"])


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("m", ["a"], 'The inputs are of type list, not values by name. For example: {"excerpt": ["A text."]}'),
        ("m", "a", 'The inputs are of type str, not values by name. For example: {"excerpt": ["A text."]}'),
        (
            "forest",
            np.zeros((2, 5)),
            'The inputs are of type ndarray, not values by name. For example: {"X": an array of shape [rows, 5]}',
        ),
        (["a"], None, "The model is ['a'], not a name."),
    ],
)
def test_values_without_names_are_refused(
    model: Any, inputs: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {"m": (TEXT, WEIGHT), "forest": (TensorSpec("X", "TYPE_FP32", (5,)),)}

    def send(_: object, call: Call, *__: object) -> Description:
        return Description(ModelSpec(call.model, specs[call.model], (), 8))

    async def send_async(_: object, call: Call, *__: object) -> Description:
        return send(_, call)

    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            with pytest.raises(InputError) as error:
                await client.infer(model, inputs)
            assert str(error.value).startswith(message)

    monkeypatch.setattr(Client, "_send", send)
    monkeypatch.setattr(AsyncClient, "_send", send_async)
    with Client("127.0.0.1:1") as client:
        for method in (client.infer, client.stream):
            with pytest.raises(InputError) as error:
                method(model, inputs)
            assert str(error.value).startswith(message)
    asyncio.run(ask())


@pytest.mark.parametrize("numbers", [[[1.9]], [[2**70]], [[-1]], [[256]]])
def test_numbers_are_not_bent_to_fit(numbers: list[list[float]]) -> None:
    spec = TensorSpec("V", "TYPE_UINT8", (-1,))
    assert convert(spec, V=[[0, 255]])["V"].tolist() == [[0, 255]]
    with pytest.raises(InputError, match=r"V (cannot be read as|holds a number that) TYPE_UINT8"):
        convert(spec, V=numbers)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_arrays_of_floats_are_rounded_as_lists_are(dtype: type[Any]) -> None:
    given = np.array([0.1, np.inf, np.nan], dtype)
    for value in (given, given.tolist()):
        found = convert(WEIGHT, WEIGHT=value)["WEIGHT"]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found[:, 0], given.astype(np.float32))
    with pytest.raises(InputError, match="TYPE_FP32, which cannot hold all of these numbers"):
        convert(WEIGHT, WEIGHT=np.array([1e39]))


def test_a_request_needs_an_input() -> None:
    with pytest.raises(InputError, match="The request has no inputs"):
        convert(WEIGHT)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_is_not_a_model(kind: Any) -> None:
    made = kind("127.0.0.1:1")
    with pytest.raises(InputError, match=r'Name one: client\.infer\("MODEL", INPUT=values\)$'):
        made(["a"])


# --- pipelines ---------------------------------------------------------------------------------------------------


def test_branches_run_side_by_side(repository: Path) -> None:
    pipeline = load(repository / "ensemble_all")
    meeting = threading.Barrier(2, timeout=20)  # breaks unless both branches are there at once

    def meet(model: HostedModel) -> HostedModel:
        def call(inputs: Any) -> Any:
            meeting.wait()
            return model.call(inputs)

        return replace(model, ask=call)

    models = dict(pipeline._models)
    for name in ("bert-large", "cuml"):
        models[name, 1] = meet(models[name, 1])
    assert Pipeline(pipeline._graph, models)(excerpt=["A cat."])["SCORE"].shape == (1, 1)


def test_a_batch_is_its_rows(pipeline: Pipeline, passages: Any) -> None:
    texts = [*passages.texts[:6], "", "漢字"]
    batch = pipeline(excerpt=texts)["SCORE"]
    singles = np.concatenate([pipeline(excerpt=[text])["SCORE"] for text in texts])
    np.testing.assert_allclose(batch, singles, rtol=0, atol=1e-5)
    others = pipeline(excerpt=[texts[0], *reversed(texts[1:]), texts[1]])["SCORE"]
    np.testing.assert_allclose(others[0], batch[0], rtol=0, atol=1e-5)  # beside other texts


def test_a_single_model_is_a_pipeline(repository: Path) -> None:
    with pytest.raises(InputError, match=r'For example: \{"INPUT0": \["A text\."\]\}$'):
        load(repository / "preprocess")(["A cat."])  # type: ignore[arg-type]
    features = load(repository / "preprocess")(INPUT0=["A cat."])["TREE_FEATS"]
    assert features.shape == (1, 207)
    assert load(repository / "cuml")(input__0=features)["output__0"].shape == (1, 1)


def test_ensembles_may_be_nested(repository: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "r")
    outer = tmp_path / "r" / "outer"
    outer.mkdir()
    (outer / "config.pbtxt").write_text(
        """
        platform: "ensemble" max_batch_size: 512
        input { name: "T" data_type: TYPE_STRING dims: [1] }
        output { name: "S" data_type: TYPE_FP32 dims: [1] }
        ensemble_scheduling { step {
          model_name: "ensemble_all" model_version: -1
          input_map { key: "excerpt" value: "T" } output_map { key: "SCORE" value: "S" } } }
        """,
        encoding="utf-8",
    )
    nested = load(outer)
    assert np.array_equal(nested(T=["A cat."])["S"], pipeline(excerpt=["A cat."])["SCORE"])
    nested.close()


def test_batch_mates_of_the_same_width_change_nothing(pipeline: Pipeline) -> None:
    rows = [
        pipeline(excerpt=["The cat sat.", mate, mate, mate])["SCORE"][0] for mate in ("A dog ran.", "Fish do swim!")
    ]
    assert rows[0] == rows[1]


def test_a_model_needs_a_version_folder(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "cuml", tmp_path / "cuml")
    shutil.rmtree(tmp_path / "cuml" / "1")
    with pytest.raises(ArtifactError, match="Model cuml has no version folder"):
        load(tmp_path / "cuml")


def test_an_error_of_a_step_is_the_callers(pipeline: Pipeline) -> None:
    with pytest.raises(InputError, match=r"excerpt\[0\] is not valid UTF-8"):
        pipeline(excerpt=[b"\xff"])


def test_more_rows_than_a_batch_are_run_in_parts(repository: Path) -> None:
    model, texts = load(repository / "preprocess"), [f"Cat {number % 7} sat." for number in range(520)]
    parts = [model(INPUT0=part)["TREE_FEATS"] for part in (texts[:300], texts[300:])]
    assert np.array_equal(model(INPUT0=texts)["TREE_FEATS"], np.concatenate(parts))
    with pytest.raises(InputError, match=r"^excerpt\[515\] is not valid UTF-8"):
        model(INPUT0=[*texts[:515], b"\xff"])


def test_steps_whose_inputs_never_come_are_named(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "r")
    config = tmp_path / "r" / "ensemble_all" / "config.pbtxt"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('value: "excerpt"', 'value: "SCORE"'), encoding="utf-8")
    with pytest.raises(ArtifactError, match="ensemble_all, steps wait for one another in a circle: SCORE"):
        load(tmp_path / "r" / "ensemble_all")(excerpt=["a"])


def test_backends_that_are_not_known_are_named(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "cuml", tmp_path / "cuml")
    config = tmp_path / "cuml" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace('"fil"', '"magic"'), encoding="utf-8")
    known = "python, fil, onnxruntime, openvino, pytorch"
    with pytest.raises(ArtifactError, match=rf"Model cuml has no model\.py for backend 'magic'\. Known: {known}"):
        load(tmp_path / "cuml")


def test_loading_a_model_file_leaves_the_path_alone() -> None:
    before = list(sys.path)
    assert component_class(ROOT / "postprocess" / "readability" / "1" / "model.py").__name__ == "Blend"
    assert sys.path == before


# --- artifacts that are not what they should be ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "artifact", "message"),
    [
        ("cuml", "checkpoint.tl", r"checkpoint\.tl is not a Treelite checkpoint"),
        ("bert-large", "model.pt", r"model\.pt is not a TorchScript file"),
        ("preprocess", "preprocess.json", r"preprocess\.json is not a preprocessing bundle"),
        (
            "preprocess",
            "vocab.txt",
            r"vocab\.txt is not (the one preprocess\.json was made with|a vocabulary: it is empty)",
        ),
    ],
)
def test_damaged_artifacts_are_named(repository: Path, tmp_path: Path, model: str, artifact: str, message: str) -> None:
    for content in (b"", b"junk", None):
        copy = tmp_path / str(content)
        shutil.copytree(repository / model, copy / model)
        path = copy / model / "1" / artifact
        path.write_bytes(path.read_bytes()[:3000] if content is None else content)
        with pytest.raises(ArtifactError, match=message):
            load(copy / model)


def test_a_forest_of_other_size_is_named(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "cuml", tmp_path / "cuml")
    config = tmp_path / "cuml" / "config.pbtxt"
    config.write_text(config.read_text(encoding="utf-8").replace("207", "206"), encoding="utf-8")
    with pytest.raises(
        ArtifactError, match=r"takes 207 features and gives 1 score; the config of cuml declares input__0 \[206\]"
    ):
        load(tmp_path / "cuml")


def test_a_dtype_that_cannot_be(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "bert-large", tmp_path / "bert-large")
    with (tmp_path / "bert-large" / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write('parameters { key: "dtype" value: { string_value: "fp8" } }\n')
    with pytest.raises(ArtifactError, match=r"model\.pt cannot run in dtype 'fp8'"):
        load(tmp_path / "bert-large")


def test_a_models_file_in_place_of_a_repository(tmp_path: Path) -> None:
    file = tmp_path / "my net.onnx"
    file.touch()
    made = "shoal add-model '" + str(file) + "' my_net && shoal compose my_net build/my_net/repository --project ."
    with pytest.raises(ArtifactError) as error:
        load(file)
    assert str(error.value).endswith(f"make the repository build/my_net/repository of it: {made}")
