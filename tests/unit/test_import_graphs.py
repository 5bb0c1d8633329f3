"""ONNX and TorchScript models of someone's own become leaves that answer as their source does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from shoal.authoring.project.importing.add_model import add_model
from shoal.authoring.project.importing.imported import make_config
from shoal.errors import ArtifactError, InputError
from tests.support.imports import (
    NUM_ROWS,
    Column,
    Pooled,
    Tagger,
    add,
    here,
    load_script,
    save_column,
    save_net,
    save_texts,
    save_tokens,
    script,
)  # fmt: skip

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((NUM_ROWS, 5)).astype(np.float32)
WIDTH = 12
LENGTHS = RNG.integers(1, WIDTH + 1, NUM_ROWS)
MASK = (np.arange(WIDTH) < LENGTHS[:, None]).astype(np.int64)
IDS = RNG.integers(0, 50, (NUM_ROWS, WIDTH)) * MASK
MODELS = ("net", "texts", "column_onnx", "bert_like", "tagger", "pooled", "column")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    save_net(folder / "net.onnx")
    save_texts(folder / "texts.onnx")
    save_column(folder / "column_onnx.onnx")
    save_tokens(folder / "bert_like.onnx")
    script(Tagger(), folder / "tagger.pt")
    script(Pooled(), folder / "pooled.pt")
    script(Column(), folder / "column.pt")
    return folder


@pytest.fixture(scope="module")
def project(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a leaf of each."""
    project = tmp_path_factory.mktemp("project")
    for name in MODELS[:4]:
        add(project, sources / f"{name}.onnx", name)
    tokens = ["INT64:-1", "INT64:-1"]
    add(project, sources / "tagger.pt", "tagger", inputs=tokens)
    add(project, load_script(sources / "pooled.pt"), "pooled", inputs=["ids:INT64:-1", "mask:INT64:-1"], mask="mask")
    add(project, sources / "column.pt", "column", inputs=["FP32:5"])
    return project


@pytest.fixture(scope="module")
def requests() -> dict[str, dict[str, NDArray[Any]]]:
    texts = np.array([f"word {i % 7}é".encode() for i in range(NUM_ROWS)], object)[:, None]
    tokens = {"ids": IDS, "mask": MASK}
    return {
        "net": {"x": FEATURES},
        "texts": {"a": texts, "b": texts[::-1].copy()},
        "column_onnx": {"x": FEATURES},
        "bert_like": {"input_ids": IDS, "attention_mask": MASK},
        "tagger": {"INPUT__0": IDS, "INPUT__1": MASK},
        "pooled": tokens,
        "column": {"INPUT__0": FEATURES},
    }


@pytest.fixture(scope="module")
def expected(sources: Path, requests: dict[str, dict[str, NDArray[Any]]]) -> dict[str, list[NDArray[Any]]]:
    """Return each library's own answer; one number per row becomes a column."""
    found: dict[str, list[Any]] = {}
    for name, given in requests.items():
        if (sources / f"{name}.onnx").exists():
            session = onnxruntime.InferenceSession(sources / f"{name}.onnx", providers=["CPUExecutionProvider"])
            decoded = {
                key: np.vectorize(bytes.decode, otypes=[object])(array) if array.dtype == object else array
                for key, array in given.items()
            }
            found[name] = session.run(None, decoded)
        else:
            with torch.inference_mode():
                out = load_script(sources / f"{name}.pt")(*map(torch.from_numpy, given.values()))
            found[name] = [one.numpy() for one in (out if isinstance(out, tuple) else (out,))]
    found["texts"][1] = np.array([text.encode() for text in found["texts"][1].ravel()], object)[:, None]
    return {name: [out[:, None] if out.ndim == 1 else out for out in some] for name, some in found.items()}


def check_same(found: dict[str, NDArray[Any]], expected: list[NDArray[Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found.values(), expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
        else:
            assert np.array_equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_in_this_process(name: str, project: Path, requests: Any, expected: Any) -> None:
    check_same(here(project, name, **requests[name]), expected[name])


def test_a_text_that_is_not_utf_8(project: Path) -> None:
    with pytest.raises(InputError, match=r"not (valid )?UTF-8"):
        here(project, "texts", a=np.array([[b"\xff"]], object), b=np.array([[b"a"]], object))


# --- which family ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("net.onnx", {"task": "embeddings"}, r"--task embeddings needs a tokenizer, and .*net\.onnx has none\."),
        ("tagger.pt", {"pooling": "cls"}, r"Unknown option for a TorchScript model: pooling\. It takes: inputs, mask"),
        ("absent.onnx", {}, r"There is no file .*absent\.onnx\."),
        ("absent.gguf", {}, r"There is no file .*absent\.gguf\."),
        ("forest.pkl", {}, r"forest\.pkl is a pickle, which cannot be added\. A pickle runs code"),
        ("weights.pth", {}, r"weights\.pth is weights of PyTorch .* Save it with torch\.jit\.save"),
        ("model.h5", {}, r"model\.h5 is a model of Keras, .* Convert it to ONNX"),
    ],
)
def test_sources_and_options_that_cannot_be(
    source: str, options: dict[str, Any], message: str, sources: Path, tmp_path: Path
) -> None:
    path = sources / source
    if path.suffix in (".pkl", ".pth", ".h5"):
        path = tmp_path / source
        path.touch()
    with pytest.raises(InputError, match=message):
        add_model(path, "m", project=tmp_path, **options)


def test_objects_that_are_not_models(tmp_path: Path, sources: Path) -> None:
    with pytest.raises(
        InputError, match=r"A list is not a model that can be added\. Give a file, an encoder's name, or an"
    ):
        add_model([], "m", project=tmp_path)
    with pytest.raises(InputError, match=r"A ModelProto cannot be added as an object\. Save it: onnx\.save"):
        add_model(onnx.load(str(sources / "net.onnx")), "m", project=tmp_path)


def test_nothing_is_written_over_and_nothing_on_trial(sources: Path, tmp_path: Path) -> None:
    source = sources / "net.onnx"
    paths = add_model(source, "net", project=tmp_path, is_dry=True)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in paths) == [
        "models/net/1/model.onnx", "models/net/config.pbtxt",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    add(tmp_path, source, "net")
    with pytest.raises(InputError, match=r"There is a model net already"):
        add_model(source, "net", project=tmp_path)
    with pytest.raises(InputError, match=r"'my net' is not a valid model name"):
        add_model(source, "my net", project=tmp_path)


def test_models_that_check_refuses_are_not_written(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misname(*arguments: Any, **options: Any) -> Any:
        message = make_config(*arguments, **options)
        message.input[0].name = "other"
        return message

    monkeypatch.setattr("shoal.authoring.project.importing.graphs.make_config", misname)
    with pytest.raises(ArtifactError, match=r"models/net is not written, since net/config\.pbtxt:.* \[onnx-tensors\]"):
        add_model(sources / "net.onnx", "net", project=tmp_path)
    assert list(tmp_path.iterdir()) == []
