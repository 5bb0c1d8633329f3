"""``shoal new pipeline``: what an input reads where several outputs fit; no step is skipped silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.authoring.check.families import check
from shoal.authoring.project.scaffold.clone import draft_like
from shoal.authoring.project.scaffold.pipelines import draft_pipeline
from shoal.authoring.repository.config import read_config
from shoal.errors import InputError
from tests.support.skeletons import write_leaf


def write_chain(project: Path, logits: str = "OUTPUT__0") -> None:
    write_leaf(project, "cnn", "IMAGE FP32 3,32,32", f"{logits} FP32 -1")
    write_leaf(project, "probs", "LOGITS FP32 -1", "PROBABILITIES FP32 -1")
    write_leaf(project, "best", "SCORES FP32 -1", "LABELS STRING -1; TOP_SCORES FP32 -1")


def wire(project: Path, *steps: str, **maps: str) -> list[str]:
    given = {key.replace("__", ".", 1): value for key, value in maps.items()}
    return list(draft_pipeline("it", steps, maps=given, project=project).said)


def test_the_output_that_no_step_reads_is_taken(tmp_path: Path) -> None:
    write_chain(tmp_path)
    said = wire(tmp_path, "cnn", "probs", "best")
    assert said[1:3] == ["probs.LOGITS reads cnn.OUTPUT__0.", "best.SCORES reads probs.PROBABILITIES."]
    assert wire(tmp_path, "cnn", "probs", "best", best__SCORES="cnn.OUTPUT__0")[2] == "best.SCORES reads cnn.OUTPUT__0."


def test_a_name_does_not_skip_a_step(tmp_path: Path) -> None:
    """An output of the input's own name, which another step processes already."""
    write_chain(tmp_path, logits="SCORES")
    with pytest.raises(InputError) as refused:
        wire(tmp_path, "cnn", "probs", "best")
    assert refused.value.what == "best.SCORES (FP32 [any]) fits cnn.SCORES and probs.PROBABILITIES."
    assert refused.value.fix.endswith("For example: --map best.SCORES=probs.PROBABILITIES")
    assert "best.SCORES reads cnn.SCORES." in wire(tmp_path, "cnn", "probs", "best", best__SCORES="cnn.SCORES")


def test_two_models_read_one_output(tmp_path: Path) -> None:
    write_leaf(tmp_path, "trunk", "TEXT STRING 1", "EMBEDDING FP32 384; COUNTS FP32 -1")
    write_leaf(tmp_path, "one", "EMBEDDING FP32 384", "ONE FP32 2")
    write_leaf(tmp_path, "two", "EMBEDDING FP32 384", "TWO FP32 2")
    said = wire(tmp_path, "trunk", "one", "two")
    assert said[1:3] == ["one.EMBEDDING reads trunk.EMBEDDING.", "two.EMBEDDING reads trunk.EMBEDDING."]


def test_the_example_names_the_nearest(tmp_path: Path) -> None:
    write_chain(tmp_path)
    write_leaf(tmp_path, "other", "IMAGE FP32 3,32,32", "OTHER FP32 -1")
    write_leaf(tmp_path, "vote", "FIRST FP32 -1; SECOND FP32 -1", "BLEND FP32 -1")
    with pytest.raises(InputError) as refused:
        wire(tmp_path, "cnn", "other", "best")
    assert refused.value.fix.endswith("For example: --map best.SCORES=other.OTHER")
    with pytest.raises(InputError) as refused:  # what follows reads the vote, as it would with the example
        wire(tmp_path, "cnn", "probs", "other", "vote", "best")
    assert refused.value.fix.endswith("For example: --map vote.FIRST=probs.PROBABILITIES --map vote.SECOND=other.OTHER")
    maps = {"vote__FIRST": "probs.PROBABILITIES", "vote__SECOND": "other.OTHER"}
    assert "best.SCORES reads vote.BLEND." in wire(tmp_path, "cnn", "probs", "other", "vote", "best", **maps)


def test_more_inputs_than_outputs_that_fit(tmp_path: Path) -> None:
    write_chain(tmp_path)
    write_leaf(tmp_path, "vote", "FIRST FP32 -1; SECOND FP32 -1", "BLEND FP32 -1")
    with pytest.raises(InputError) as refused:
        wire(tmp_path, "cnn", "vote")
    assert refused.value.fix.endswith("For example: --map vote.FIRST=cnn.OUTPUT__0 --map vote.SECOND=SECOND")


def test_outputs_with_the_names_of_inputs(tmp_path: Path) -> None:
    """A copy's own pipeline has one tensor for each of them."""
    write_leaf(tmp_path, "engine", "carry STRING 1; SEED INT32 1", "IDS INT32 -1; carry STRING 1")
    draft_like("mine", "engine", project=tmp_path).draft.write()
    pipeline = read_config(tmp_path / "ensembles" / "mine_alone")
    assert [tensor.name for tensor in pipeline.spec.outputs] == ["IDS", "mine_carry"]
    assert pipeline.steps[0].outputs == {"IDS": "IDS", "carry": "mine_carry"}
    assert check(tmp_path) == []
