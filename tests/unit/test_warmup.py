"""Warm-up requests: derived by running the components, true to what the models are asked later."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from shoal.authoring.composition.compose import compose
from shoal.authoring.composition.warmup import derive
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.graph import Graph
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.warmup_request import FOLDER, TEXT
from shoal.clients.local import Pipeline, load
from tests.support.skeletons import MEMBERS


def test_every_model_is_warmed_up_with_what_the_text_becomes(repository: Path, pipeline: Pipeline) -> None:
    found = derive([Graph.load(repository / "ensemble_all")], repository)
    assert sorted(found.requests) == sorted(MEMBERS)
    assert found.reasons == {}
    read = load(repository / "preprocess")(INPUT0=[TEXT])
    np.testing.assert_array_equal(found.requests["bert-large"]["INPUT__0"], read["BERT_IDS"])
    np.testing.assert_array_equal(found.requests["cuml"]["input__0"], read["TREE_FEATS"])
    assert 150 < read["BERT_AM"].sum() < 256
    assert found.requests["postprocess"].keys() == {"BERT_LARGE_SCORE", "CUML_SCORE"}  # the weight may be left out
    assert pipeline(excerpt=[TEXT])["SCORE"].shape == (1, 1)


def test_derived_requests_are_written(repository: Path) -> None:
    found = derive([Graph.load(repository / "ensemble_all")], repository)
    for model in MEMBERS:
        (entry,) = read_config(repository / model).message.model_warmup
        assert (entry.batch_size, entry.count) == (1, 2)
        for name, given in entry.inputs.items():
            array = found.requests[model][name]
            assert [1, *given.dims] == list(array.shape)
            written = (repository / model / FOLDER / given.input_data_file).read_bytes()
            assert written.endswith(array.item() if array.dtype == object else array.tobytes())
    assert read_manifest(repository)["not_warmed_up"] == {}


def test_components_that_do_not_run_here_are_skipped(artifacts: Path, tmp_path: Path) -> None:
    """Its libraries may be in the environment of the server alone: the models behind it start cold, and it is said."""
    from shoal.system.paths import shipped_root

    own = tmp_path / "own"
    shutil.copytree(shipped_root() / "preprocess", own / "preprocess")
    model = own / "preprocess" / "readability" / "1" / "model.py"
    text = model.read_text(encoding="utf-8")
    model.write_text(text.replace("def setup(", "def setup(self, context):\n        import nowhere\n\n    def late("))
    repository = compose("ensemble_all", tmp_path / "repository", artifacts=artifacts, projects=[own])
    reasons = read_manifest(repository)["not_warmed_up"]
    assert reasons["preprocess"] == "it does not run here: ModuleNotFoundError: No module named 'nowhere'"
    assert reasons["bert-large"] == "no value is known for its input INPUT__0, INPUT__1"
    assert sorted(reasons) == ["bert-large", "preprocess"]  # the forest's input has one shape: zeros
    assert not read_config(repository / "bert-large").message.model_warmup
    assert not list(repository.rglob("__pycache__"))


def test_warm_up_can_be_left_out(artifacts: Path, tmp_path: Path) -> None:
    repository = compose("ensemble_all", tmp_path / "repository", artifacts=artifacts, is_warmed_up=False)
    assert not any(read_config(repository / model).message.model_warmup for model in MEMBERS)
    assert not list(repository.glob(f"*/{FOLDER}"))
