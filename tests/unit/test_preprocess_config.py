from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import ArtifactError
from shoal.kit.component.files import sha256
from shoal.kit.component.provenance import check_ties, dump_ties, read_archive
from shoal.kit.forests.checkpoints import read_forest
from shoal.readability.preprocess_config import Bundle


def test_the_same_bundle_gives_the_same_bytes(bundle: Bundle, artifacts: Path) -> None:
    assert bundle.dumps() == (artifacts / "preprocess.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frequent": ["a"]}, "frequent has 1 entries, expected 100"),
        ({"mean": []}, "mean has 0 entries, expected 207"),
        ({"format": 9}, "has format 9; this shoal reads 1"),
        ({"surprise": 1}, "is not a preprocessing bundle: .*surprise"),
    ],
)
def test_bundles_that_do_not_fit(bundle: Bundle, tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "preprocess.json"
    path.write_text(json.dumps(json.loads(bundle.dumps()) | change), encoding="utf-8")
    with pytest.raises(ArtifactError, match=message):
        Bundle.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_files_that_are_not_a_bundle(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocess.json").write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"preprocess\.json is not a preprocessing bundle"):
        Bundle.load(tmp_path / "preprocess.json")


def test_a_word_is_in_one_list(bundle: Bundle) -> None:
    with pytest.raises(ArtifactError, match="both frequent and rare"):
        replace(bundle, rare=bundle.frequent)


def test_the_vocabulary_must_be_the_bundles(bundle: Bundle, artifacts: Path, tmp_path: Path) -> None:
    bundle.check_vocabulary(artifacts / "vocab.txt")
    (tmp_path / "vocab.txt").write_text("[PAD]\n", encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"vocab\.txt is not the one preprocess\.json was made with"):
        bundle.check_vocabulary(tmp_path / "vocab.txt")


def test_artifacts_carry_what_they_were_made_with(artifacts: Path) -> None:
    assert read_forest(artifacts / "checkpoint.tl").ties == {"preprocess.json": sha256(artifacts / "preprocess.json")}
    assert read_archive(artifacts / "model.pt") == {"vocab.txt": sha256(artifacts / "vocab.txt")}


def test_ties_are_looked_up_in_the_repository(tmp_path: Path) -> None:
    forest, other = tmp_path / "cuml" / "1" / "checkpoint.tl", tmp_path / "preprocess" / "1" / "preprocess.json"
    ties = json.loads(dump_ties({"preprocess.json": "0" * 64}))["shoal_ties"]
    check_ties(ties, forest)  # nothing to compare with
    other.parent.mkdir(parents=True)
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(
        ArtifactError,
        match=r"checkpoint\.tl was made with another preprocess\.json than .*/preprocess/1/preprocess\.json",
    ):
        check_ties(ties, forest)
    check_ties({"preprocess.json": sha256(other)}, forest)
