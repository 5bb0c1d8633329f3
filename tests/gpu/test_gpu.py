"""On a real GPU: the same answers as on the host, and a forest trained there.

Without one every test here is skipped. With one: ``make gpu``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import Plan
from shoal.clients.local import Pipeline, load
from shoal.kit.component.tensors import Device
from shoal.kit.text.device import Ragged, upload
from shoal.kit.text.tokens import read_vocabulary
from shoal.readability.corpus import Corpus
from shoal.readability.evaluate import evaluate
from shoal.readability.fit import EncoderSettings
from shoal.readability.forest import export_forest, forest_inputs, has_cuml, train_forest
from shoal.readability.preprocess_config import Bundle
from shoal.readability.reader import DeviceReader, Reader, Reading
from shoal.readability.train import Preset, train
from tests.conftest import Scale
from tests.gpu.conftest import needs_gpu
from tests.support.emulation import EmulatedText, to_strings
from tests.support.readings import assert_same_reading, batches, nasty_strings

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def device() -> Device:
    made = Device("gpu", 0)
    made.prepare()
    return made


@pytest.fixture(scope="module")
def vocabulary(artifacts: Path) -> list[str]:
    return read_vocabulary(artifacts / "vocab.txt")


@pytest.fixture(scope="module")
def read(vocabulary: list[str], bundle: Bundle, device: Device) -> DeviceReader:
    return DeviceReader(vocabulary, bundle, device, "TEXT")


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def on_gpu(request: pytest.FixtureRequest, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    plan = Plan(placement="gpu", dtype=request.param)
    repository = compose("ensemble_all", tmp_path_factory.mktemp("gpu") / "r", artifacts=artifacts, plan=plan)
    loaded = load(repository / "ensemble_all")
    yield request.param, loaded
    loaded.close()


def down(device: Device, reading: Reading) -> Reading:
    return Reading(*(device.fetch(array, "(test)") for array in reading))


# --- the same answers --------------------------------------------------------------------------------------------


def test_tokens_and_features_are_the_hosts_on_real_texts(
    read: DeviceReader, vocabulary: list[str], bundle: Bundle, device: Device, texts: list[str]
) -> None:
    reference = Reader(vocabulary, bundle)
    for batch in batches(texts, 100):
        assert_same_reading(down(device, read(batch)), reference(batch))


def test_tokens_and_features_are_the_hosts_on_nasty_unicode(
    read: DeviceReader, vocabulary: list[str], bundle: Bundle, device: Device, scale: Scale
) -> None:
    reference = Reader(vocabulary, bundle)

    def check(strings: list[str]) -> None:
        assert_same_reading(down(device, read(strings)), reference(strings))

    nasty_strings(check, scale(10_000, 100_000))


@pytest.mark.parametrize(
    "texts",
    [
        [" "], ["", " "], ["a"], ["!"], ["\n", "a"], ["", ""], ["a b", "Hello world. "],
        ["A cat sat on the mat. " * 9, "a", "\n " + "one more " * 40 + " ", "I"],
    ],
)  # fmt: skip
def test_batches_of_next_to_nothing(
    read: DeviceReader, vocabulary: list[str], bundle: Bundle, device: Device, texts: list[str]
) -> None:
    reference = Reader(vocabulary, bundle)
    assert_same_reading(down(device, read(texts)), reference(texts))


def test_libcudf_follows_the_emulated_rules(read: DeviceReader, vocabulary: list[str], device: Device) -> None:
    """Each code point between two letters: what the CPU's tests emulate is what libcudf does."""
    emulated = EmulatedText(vocabulary, Device())
    from tests.support.emulation import _DIFFERING

    codes = [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and c not in _DIFFERING]
    for batch in batches([f"a{chr(code)}b" for code in codes], 100_000):
        there = read._engine.normalise(upload(batch, device, "TEXT"))
        here = Ragged(device.fetch(there.values, "(test)"), device.fetch(there.offsets, "(test)"))
        expected = to_strings(emulated.normalise(upload(batch, Device(), "TEXT")))
        assert [text.split() for text in to_strings(here)] == [text.split() for text in expected]


def test_the_ensemble_is_the_hosts(on_gpu: tuple[str, Pipeline], pipeline: Pipeline, texts: list[str]) -> None:
    dtype, there = on_gpu
    for batch in batches([*texts[:200], "", "cat [SEP] cat"], 67):
        weights = np.linspace(0, 1, len(batch), dtype=np.float32)
        got, expected = (p(excerpt=batch, BERT_WEIGHT=weights) for p in (there, pipeline))
        np.testing.assert_allclose(got["FOREST_SCORE"], expected["FOREST_SCORE"], atol=1e-5)
        tolerance = {"fp32": 1e-3, "bf16": 0.02, "fp16": 0.005}[dtype]  # TF32 is off by default
        for name in ("SCORE", "BERT_SCORE"):
            np.testing.assert_allclose(got[name], expected[name], atol=tolerance)


# --- training ----------------------------------------------------------------------------------------------------


def test_cuml_trains_a_forest_that_is_served(bundle: Bundle, texts: list[str], artifacts: Path, tmp_path: Path) -> None:
    if not has_cuml():
        pytest.skip("cuML is not installed: pip install 'shoal[gpu-train]'")
    import shutil

    from shoal.kit.component.files import sha256

    sample = texts[:300]
    features = forest_inputs(bundle, sample)
    targets = features[:, 0] * 0.5 + features[:, 4]
    forest = train_forest(bundle, sample, targets, seed=0, num_trees=50)
    shutil.copytree(artifacts, tmp_path / "artifacts")
    (tmp_path / "artifacts" / "report.json").unlink()  # it names the forest that was trained first
    export_forest(
        forest, features, tmp_path / "artifacts" / "checkpoint.tl", bundle_sha256=sha256(artifacts / "preprocess.json")
    )
    repository = compose("ensemble_all", tmp_path / "r", artifacts=tmp_path / "artifacts", plan=Plan(placement="gpu"))
    served = load(repository / "ensemble_all")(excerpt=sample)["FOREST_SCORE"][:, 0]
    np.testing.assert_allclose(served, forest.predict(features), atol=1e-4)
    assert np.corrcoef(served, targets)[0, 1] > 0.8


def test_an_encoder_trained_on_the_gpu_is_served(passages: Corpus, tmp_path: Path) -> None:
    """In BF16, with activations computed twice, in two parts; it learns, and the host can score with it."""
    settings = EncoderSettings(max_epochs=4, accumulation=2, gradient_checkpointing=True)
    report = train(passages, tmp_path / "artifacts", preset=Preset(num_folds=2, num_trees=20, encoder=settings))
    assert report["machine"]["gpu"]
    rmse = report["unseen_rmse"]
    assert rmse["encoder"] < 0.8 * rmse["mean of training rows"]
    seen = evaluate(tmp_path / "artifacts", passages, seen="include")["predictions"]
    assert next(entry["rmse"] for entry in seen if entry["name"] == "encoder") < rmse["encoder"]
