"""``shoal new``: what it refuses, in which words; and that it then writes nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.authoring.project.scaffold.skeletons import draft_component
from shoal.errors import InputError, SetupError
from tests.support.skeletons import files, new, run, write_leaf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("model it --features 0", r"A linear model of 0 features cannot be fitted here\. Give a number from"),
        ("component my..words", r"'my\.\.words' is not a valid model name: .* For example: my_\.words"),
        ("component words.", r"'words\.' is not a valid model name: .* For example: words"),
        ("component it.1 --like vllm --set max_num_seq=4", r"--set: .* max_num_seqs; .* Did you mean max_num_seqs\?"),
        ("component it --like vllm --set max_num_seqs=x", r"--set: max_num_seqs is \"x\", not a whole number\."),
        ("component 1st", r"'1st' is not a valid model name: .* For example: st"),
        ("component ÄÖ", r"'ÄÖ' is not a valid model name: .* For example: word_count"),
        ("component preprocess", r"preprocess is a model of shoal's own: .* Choose another name: my_preprocess"),
        ("component taken", r"There is a model taken already, in preprocess/taken\. Choose another name"),
        ("component free", r"There is a model free_alone already, in preprocess/free_alone\."),
        ("component dull", r"tests/test_dull\.py already exists; it will not be overwritten"),
        ("component it --input X", r"--input 'X' is not NAME:DTYPE:DIMS\. For example: --input TEXT:STRING:1"),
        ("component it --input X:FLOAT:1", r"has an unknown dtype: FLOAT\. Known: BOOL, UINT8, .* STRING\."),
        ("component it --input X:FP32:0", r"--input 'X:FP32:0' has invalid dimensions: 0\. For example"),
        ("component it --output a/b:FP32:1", r"--output 'a/b:FP32:1' has an invalid tensor name 'a/b': use up to 48"),
        ("component it --input X:FP32:1 --output X:FP32:1", r"There are two tensors X\. Give each input and output a"),
        ("component it --set a=1", r"--set a=1 is for a copy of a component\. Name that component: --like MODEL"),
        ("component it --artifact a=1", r"--artifact a=1 is for a copy of a component\."),
        ("component it --like nope", r"There is no model nope to copy\. Known: .*preprocess, .*taken, "),
        ("component it --like ensemble_all", r"ensemble_all is a pipeline, which calls models by name\. Known"),
        ("component it --like taken --set a=1", r"taken has no parameter a\. It has: none\."),
        ("component it --like preprocess --set a=1", r"preprocess has no parameter a\. It has: .*max_text_bytes\."),
        ("component it --like preprocess --set a", r"--set 'a' is not NAME=VALUE\. For example: --set max_length=128"),
        ("component it --like preprocess --set a=1 --set a=2", r"--set a=\.\.\. is given twice\. Give it once\."),
        ("component it --like preprocess --artifact a=b", r"preprocess has no artifact a\. It has: preprocess\.json"),
        ("component it --like preprocess --artifact vocab.txt=no", r"There is no file no for the artifact vocab"),
        ("component it --like taken --artifact a=b", r"taken has no artifact a\. It has none\."),
        ("component it --like taken --input Z:FP32:1", r"taken has no input Z\. It has: X\."),
        ("component it --project file", r"file is not a folder\. Name the folder of your project"),
        ("component it --project composed", r"composed is a repository that shoal composed: the next"),
        ("pipeline it --step takne", r"There is no model takne\. Did you mean taken\?"),
        ("pipeline it --step nope", r"There is no model nope\. Known: bert-large, .*taken, "),
        ("pipeline it --step taken --step taken", r"The model taken is given twice as a step\. Write such"),
        ("pipeline it --map taken.X=X", r"--map taken\.X maps a step, and no steps are given\. Name the models"),
        ("pipeline it --step taken --map X", r"--map 'X' is not NAME=VALUE\. For example: --map encoder\.INPUT__0="),
        ("pipeline it --step taken --map taken.Z=X", r"Unknown input taken\.Z to map\. Known: taken\.X\."),
        ("pipeline it --step taken --map taken.X=a/b", r"--map taken\.X=a/b has an invalid tensor name 'a/b'"),
        ("pipeline it --step taken --map taken.X=taken.Y", r"--map taken\.X=taken\.Y reads a step that comes later"),
        ("pipeline it --step taken --map taken.X=taken.N", r"Model taken has no output N: --map .* It has: Y\."),
        ("pipeline it --step taken --step ids --map ids.IDS=taken.Y", r"Input IDS of model ids is TYPE_INT64, and"),
    ],
)  # fmt: skip
def test_refusals(here: Path, arguments: str, message: str) -> None:
    write_leaf(here, "taken", "X FP32 4", "Y FP32 4")
    write_leaf(here, "ids", "IDS INT64 4", "OUT INT64 4")
    write_leaf(here, "free_alone", "X FP32 4", "Y FP32 4")
    (here / "tests").mkdir()
    (here / "tests" / "test_dull.py").touch()
    (here / "file").touch()
    (here / "composed").mkdir()
    (here / "composed" / "manifest.json").touch()
    before = files(here)
    with pytest.raises(InputError, match=message):
        new(*arguments.split())
    assert files(here) == before


@pytest.mark.parametrize(
    ("command", "missing"), [("component", "argument 'name'"), ("model it", "option '--features'")]
)
def test_a_name_and_a_number_of_features_are_needed(command: str, missing: str) -> None:
    result = run("new", *command.split())
    assert result.exit_code == 2
    assert f"Missing {missing}." in result.output


def test_a_category_that_is_for_models(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Unknown --category 'models' for components\. Known: preprocess, post"):
        draft_component("it", category="models", project=tmp_path)


@pytest.mark.parametrize("command", ["component it", "model it --features 4", "pipeline it"])
def test_a_file_where_a_folder_is_needed(here: Path, command: str) -> None:
    (here / "tests").touch()
    with pytest.raises(SetupError) as refused:
        new(*command.split())
    assert refused.value.what == "tests/test_it.py cannot be written: File exists."
    assert refused.value.fix.startswith("Make tests a folder with free space that this user may write, or name another")
    assert files(here) == {"tests"}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(SetupError) as refused:
        new("component", "it")
    assert refused.value.what == f"preprocess/it/config.pbtxt cannot be written: {os.strerror(code)}."
    assert refused.value.fix.startswith("Make preprocess/it a folder with free space that this user may write, or name")
    assert files(here) == set()


def test_a_second_skeleton_leaves_the_first_ones_files(here: Path) -> None:
    (here / ".gitignore").write_text("mine\n", encoding="utf-8")
    new("component", "one", "--project", "deep/project")
    printed = new("component", "two", "--project", "deep/project")
    assert "next: pytest deep/project/tests/test_two.py\n" in printed
    assert "next: shoal compose two_alone deep/project/build/two_alone --project deep/project\n" in printed
    assert ".gitignore" not in printed
    assert (here / ".gitignore").read_text(encoding="utf-8") == "mine\n"
    with pytest.raises(InputError, match="Triton does not support the path"):
        new("component", "three", "--project", "with blank")
