"""``shoal new pipeline``: models by name, joined where their tensors fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.authoring.check.families import check
from shoal.authoring.project.scaffold.pipelines import draft_pipeline
from shoal.authoring.project.scaffold.skeletons import draft_model
from shoal.authoring.repository.config import read_config
from shoal.errors import InputError
from tests.support.imports import script
from tests.support.skeletons import check_made, check_style, files, new, run, run_test, write_leaf

pytestmark = pytest.mark.usefixtures("styles")


def test_a_pipeline_with_a_new_component(here: Path) -> None:
    printed = new("pipeline", "triage")
    leaf, pipeline = "preprocess/triage_preprocess", "ensembles/triage"
    wanted = {f"{leaf}/config.pbtxt", f"{leaf}/1/model.py", f"{pipeline}/config.pbtxt", f"{pipeline}/1/.gitkeep"}
    check_made(here, printed, {*wanted, "tests/test_triage.py", ".gitignore"}, "tests/test_triage.py")


def test_a_pipeline_of_models(here: Path) -> None:
    write_leaf(here, "reader", "TEXT STRING 1", "IDS INT64 -1; FEATURES FP32 4", size=64)
    write_leaf(here, "encoder", "INPUT INT64 -1; WEIGHT FP32 1 optional", "SCORE FP32 1")
    new("model", "score", "--features", 4)
    write_leaf(here, "blend", "FIRST FP32 1; SCORE_B FP32 1; TEXT STRING 1", "SCORE FP32 1; TEXT_TOO STRING 1")
    steps = ["--step", "reader", "--step", "encoder", "--step", "score", "--step", "blend"]
    with pytest.raises(InputError) as refused:
        new("pipeline", "all", *steps)
    assert refused.value.what == (
        "blend.FIRST (FP32 [1]) fits encoder.SCORE and score.SCORE."
        " blend.SCORE_B (FP32 [1]) fits encoder.SCORE and score.SCORE."
    )
    assert refused.value.fix.endswith(": --map blend.FIRST=encoder.SCORE --map blend.SCORE_B=score.SCORE")
    maps = refused.value.fix.split(": ")[-1].split()
    printed = new("pipeline", "all", *steps, *maps)
    for line in (
        "reader.TEXT reads TEXT of the request.", "encoder.INPUT reads reader.IDS.",
        "encoder.WEIGHT reads WEIGHT of the request.", "score.FEATURES reads reader.FEATURES.",
        "blend.FIRST reads encoder.SCORE.", "blend.TEXT reads TEXT of the request.",
        "SCORE of the answer is blend.SCORE.",
    ):  # fmt: skip
        assert f"{line}\n" in printed
    config = read_config(here / "ensembles" / "all")
    assert config.spec.max_batch_size == 64
    assert [(t.name, t.is_optional) for t in config.spec.inputs] == [("TEXT", False), ("WEIGHT", True)]
    assert [t.name for t in config.spec.outputs] == ["SCORE", "TEXT_TOO"]
    run_test(here, "tests/test_all.py")
    assert check(here) == []


def test_names_that_meet_in_a_pipeline(here: Path) -> None:
    write_leaf(here, "one", "X FP32 4", "SCORE FP32 1; X_TOO INT64 1")
    write_leaf(here, "two", "X INT64 4", "SCORE FP32 1; one_X INT64 1")
    made = draft_pipeline("both", ["one", "two"], project=here)
    made.draft.write()
    config = read_config(here / "ensembles" / "both")
    assert [(t.name, t.dtype) for t in config.spec.inputs] == [("X", "TYPE_FP32"), ("two_X", "TYPE_INT64")]
    assert [t.name for t in config.spec.outputs] == ["one_SCORE", "X_TOO", "two_SCORE", "one_X"]


def test_an_output_of_the_inputs_own_name_is_read(here: Path) -> None:
    write_leaf(here, "one", "TEXT STRING 1", "A FP32 1; B FP32 1")
    write_leaf(here, "two", "B FP32 1; A FP32 1 optional", "C FP32 1")
    new("pipeline", "both", "--step", "one", "--step", "two")
    (_, step) = read_config(here / "ensembles" / "both").steps
    assert step.inputs == {"A": "one_A", "B": "one_B"}
    new("pipeline", "again", "--step", "one", "--step", "two", "--map", "two.A=MINE", "--map", "two.B=one.A")
    (_, step) = read_config(here / "ensembles" / "again").steps
    assert step.inputs == {"A": "MINE", "B": "one_A"}


def test_parallel_first_steps_are_reported(here: Path) -> None:
    write_leaf(here, "left", "X FP32 1", "L FP32 1")
    write_leaf(here, "right", "X FP32 1", "R FP32 1")
    assert "in parallel" not in new("pipeline", "chain", "--step", "left", "--step", "right")
    printed = new("pipeline", "both", "--step", "left", "--step", "right", "--map", "right.X=X")
    assert "left and right read the request in parallel; before 26.05, Triton may stop answering" in printed
    assert [finding.rule.id for finding in check(here, target="26.04")] == ["several-first-steps"]
    assert check(here, target="26.05") == []


def test_a_pipeline_of_shoals_own_models(here: Path) -> None:
    """Its artifacts are trained: the test takes them from where `shoal train` may have put them."""
    printed = new("pipeline", "features", "--step", "preprocess", "--step", "cuml")
    assert "It needs checkpoint.tl, preprocess.json, vocab.txt: in build/artifacts, or each in its" in printed
    assert "next: shoal compose features build/features --artifacts build/artifacts --project .\n" in printed
    assert check(here) == []
    text = (here / "tests" / "test_features.py").read_text(encoding="utf-8")
    assert 'ARTIFACTS = PROJECT / "build" / "artifacts"  # checkpoint.tl, preprocess.json, vocab.txt\n' in text
    check_style(here)


class Marked(nn.Module):
    """Rows of tokens to one number each."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return (ids * mask).sum(1, keepdim=True).to(torch.float32)


def test_a_model_is_added_and_joined(here: Path) -> None:
    """By what it says of its attention mask; the ids are what is left."""
    script(Marked(), here / "tagger.pt")
    add = ["add-model", "tagger.pt", "tagger", "--input", "INT64:-1", "--input", "INT64:-1", "--mask", "INPUT__1"]
    dry = run(*add, "--dry-run")
    assert (dry.exit_code, files(here)) == (0, {"tagger.pt"})
    assert "would be written: models/tagger/config.pbtxt\nwould be written: models/tagger/1/model.pt\n" in dry.stdout
    printed = run(*add).stdout
    assert printed.startswith("TorchScript, from tagger.pt: forward(ids, mask)\n")
    assert "written: models/tagger/config.pbtxt\nwritten: models/tagger/1/model.pt\n" in printed
    assert printed.endswith("next: shoal check .\nnext: shoal new pipeline tagger_alone --step tagger\n")
    new("component", "words", "--like", "tokenizer", "--set", "max_length=64")
    printed = new("pipeline", "tagged", "--step", "words", "--step", "tagger")
    assert "tagger.INPUT__0 reads words.input_ids.\ntagger.INPUT__1 reads words.attention_mask.\n" in printed
    assert "np.testing.assert_allclose(" in (here / "tests" / "test_tagged.py").read_text(encoding="utf-8")
    assert check(here) == []
    result = run("add-model", "tagger.pt", "second", "--task", "embeddings")
    assert isinstance(result.exception, InputError)
    assert "--task embeddings needs a tokenizer, and tagger.pt has none." in str(result.exception)


def test_the_test_of_a_pipeline_of_trained_models(here: Path, artifacts: Path) -> None:
    new("pipeline", "features", "--step", "preprocess", "--step", "cuml")
    (here / "build").mkdir()
    (here / "build" / "artifacts").symlink_to(artifacts)
    run_test(here, "tests/test_features.py")


def test_in_python(tmp_path: Path) -> None:
    made = draft_model("one", 3, project=tmp_path)
    assert made.draft.write(is_dry=True) == [tmp_path / name for name in made.draft.files]
    assert files(tmp_path) == set()
