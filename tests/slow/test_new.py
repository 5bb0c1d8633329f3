"""``shoal new component`` and ``model``: each skeleton is checked, tested and served as it was written."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import shoal
from shoal.authoring.check.families import check
from shoal.authoring.composition.weights import wants
from shoal.authoring.project.scaffold.clone import draft_like
from shoal.authoring.project.scaffold.names import class_name, parse_tensor
from shoal.authoring.project.scaffold.skeletons import draft_component
from shoal.authoring.repository.config import read_config
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.errors import ShoalError
from tests.support.once import ROOT
from tests.support.skeletons import check_made, check_style, files, new, run, run_test, write_leaf

pytestmark = pytest.mark.usefixtures("styles")

BOTH = ["--input", "A:FP32:4", "--input", "NOTE:STRING:-1,2", "--output", "Y:FP16:2,-1", "--output", "WORDS:STRING:1"]


def test_a_component(here: Path) -> None:
    dry = new("component", "word-length", "--dry-run")
    assert files(here) == set()
    printed = new("component", "word-length")
    assert re.findall("^would be written: (.*)$", dry, re.MULTILINE) == re.findall(
        "^written: (.*)$", printed, re.MULTILINE
    )
    wanted = {
        "preprocess/word-length/config.pbtxt", "preprocess/word-length/1/model.py",
        "ensembles/word-length_alone/config.pbtxt", "ensembles/word-length_alone/1/.gitkeep",
        "tests/test_word_length.py", ".gitignore",
    }  # fmt: skip
    check_made(here, printed, wanted, "tests/test_word_length.py")
    for name in wanted - {"ensembles/word-length_alone/1/.gitkeep"}:
        assert f"--- {name}\n{(here / name).read_text(encoding='utf-8')}" in dry
    assert printed.endswith(
        "next: shoal check .\nnext: pytest tests/test_word_length.py\n"
        "next: shoal compose word-length_alone build/word-length_alone --project .\n"
        "next: shoal serve build/word-length_alone\n"
    )
    assert run("check", ".").stdout == "No mistakes found.\n"
    assert run("compose", "word-length_alone", "build/repository", "--project", ".").exit_code == 0
    pipeline = shoal.load("build/repository/word-length_alone")
    assert pipeline(TEXT=["Füße", b"\xff"])["LENGTH"].tolist() == [[4], [1]]
    pipeline.close()


def test_a_component_of_any_tensors(here: Path) -> None:
    printed = new("component", "mine", *BOTH, "--category", "postprocess")
    leaf, pipeline = "postprocess/mine", "ensembles/mine_alone"
    wanted = {f"{leaf}/config.pbtxt", f"{leaf}/1/model.py", f"{pipeline}/config.pbtxt", f"{pipeline}/1/.gitkeep"}
    check_made(here, printed, {*wanted, "tests/test_mine.py", ".gitignore"}, "tests/test_mine.py")
    spec = read_config(here / leaf).spec
    assert [(t.name, t.dtype, t.dims) for t in (*spec.inputs, *spec.outputs)] == [
        ("A", "TYPE_FP32", (4,)), ("NOTE", "TYPE_STRING", (-1, 2)), ("Y", "TYPE_FP16", (2, -1)),
        ("WORDS", "TYPE_STRING", (1,)),
    ]  # fmt: skip


@pytest.mark.parametrize("tensors", [[], ["--input", "A:FP32:4", "--input", "NOTE:STRING:1", "--output", "Y:FP16:2"]])
def test_a_component_that_answers_in_pieces(here: Path, tensors: list[str]) -> None:
    printed = new("component", "talk", "--streaming", *tensors)
    leaf, pipeline = "preprocess/talk", "ensembles/talk_alone"
    wanted = {f"{leaf}/config.pbtxt", f"{leaf}/1/model.py", f"{pipeline}/config.pbtxt", f"{pipeline}/1/.gitkeep"}
    check_made(here, printed, {*wanted, "tests/test_talk.py", ".gitignore"}, "tests/test_talk.py")
    with pytest.raises(ShoalError, match="--streaming is for new components"):
        new("component", "copy", "--like", "talk", "--streaming")


@pytest.mark.parametrize("dtype", ["BOOL", "UINT8", "INT16", "UINT32", "FP64", "STRING"])
def test_every_dtype_runs_here(tmp_path: Path, dtype: str) -> None:
    tensor = parse_tensor(f"X:{dtype}:1", "--input")
    made = draft_component("it", inputs=[tensor], outputs=[parse_tensor(f"Y:{dtype}:2", "--output")], project=tmp_path)
    made.draft.write()
    repository = shoal.compose(made.pipeline, tmp_path / "build" / "r", projects=[tmp_path])
    pipeline = shoal.load(repository / made.pipeline)
    answer = pipeline(X=np.ones((3, 1), tensor.numpy_dtype) if dtype != "STRING" else ["a", "b", "c"])["Y"]
    pipeline.close()
    assert (answer.shape, answer.dtype) == ((3, 2), tensor.numpy_dtype)


def test_long_names_stay_in_style(tmp_path: Path) -> None:
    tensors = [f"{letter * 48}:INT64:1000,1,1,1,1,1,1,1,1" for letter in "ABCD"]
    inputs, outputs = ([parse_tensor(text, "") for text in part] for part in (tensors[:2], tensors[2:]))
    draft_component("n" * 64, inputs=inputs, outputs=outputs, project=tmp_path).draft.write()
    text = ["T" * 48 + ":STRING:1", "L" * 48 + ":INT64:1"]
    parsed = [parse_tensor(each, "") for each in text]
    draft_component("m" * 64, inputs=parsed[:1], outputs=parsed[1:], project=tmp_path).draft.write()
    check_style(tmp_path)
    assert check(tmp_path) == []


def test_a_model(here: Path) -> None:
    printed = new("model", "score", "--features", 4)
    leaf = {f"models/score/{name}" for name in ("config.pbtxt", "1/model.py", "1/weights.json", "train.py")}
    wanted = {*leaf, "ensembles/score_alone/config.pbtxt", "ensembles/score_alone/1/.gitkeep", "tests/test_score.py"}
    check_made(here, printed, {*wanted, ".gitignore"}, "tests/test_score.py")
    assert "Until models/score/train.py has fitted it, score returns the mean of its features.\n" in printed
    (here / "data.csv").write_text("a,b,c,d,target\n" + "1,0,0,0,3\n0,1,0,0,4\n" * 9 + "0,0,0,0,1\n", encoding="utf-8")
    train = [sys.executable, "models/score/train.py"]
    assert (
        "on the 19 rows of data.csv"
        in subprocess.run([*train, "data.csv"], check=True, capture_output=True, text=True).stdout
    )
    run_test(here, "tests/test_score.py")
    for content, message in (("a,b\n1,2\n", "has 2 columns, and 5 are needed"), ("a\nb\n", "cannot be read")):
        (here / "bad.csv").write_text(content, encoding="utf-8")
        done = subprocess.run([*train, "bad.csv"], check=False, capture_output=True, text=True)
        assert done.returncode == 2
        assert message in " ".join(done.stderr.replace("│", " ").split())
    (here / "models/score/1/weights.json").write_text('{"weights": [1, 2], "bias": 0}', encoding="utf-8")
    shoal.compose("score_alone", here / "r", projects=[here], is_warmed_up=False)
    with pytest.raises(ShoalError, match=r"weights\.json has 2 weights for 4 features"):
        shoal.load(here / "r" / "score_alone")


def test_class_names() -> None:
    names = ("l2_normalise", "bert-large", "component", "none", "x")
    assert [class_name(name) for name in names] == ["L2Normalise", "BertLarge", "ComponentModel", "NoneModel", "X"]


# --- like another leaf -----------------------------------------------------------------------------------------------


def test_like_one_of_ones_own(here: Path) -> None:
    new("component", "first", "--input", "X:FP32:4", "--output", "Y:FP32:4")
    config = here / "preprocess" / "first" / "config.pbtxt"
    more = 'parameters {\n  key: "limit"  # of words\n  value: { string_value: "5" }\n}\n'
    config.write_text(config.read_text(encoding="utf-8") + more, encoding="utf-8")
    printed = new(
        "component", "second", "--like", "first", "--set", 'limit=a "b"\\', "--input", "X:FP64:7",
        "--output", "Y:FP32:-1,2", "--category", "postprocess",
    )  # fmt: skip
    assert "postprocess/second is a copy of preprocess/first.\n" in printed
    copy = read_config(here / "postprocess" / "second")
    assert copy.spec.parameters["limit"] == 'a "b"\\'
    assert [(t.dtype, t.dims) for t in (*copy.spec.inputs, *copy.spec.outputs)] == [
        ("TYPE_FP64", (7,)), ("TYPE_FP32", (-1, 2)),
    ]  # fmt: skip
    text = (here / "postprocess" / "second" / "config.pbtxt").read_text(encoding="utf-8")
    assert '  key: "limit"  # of words\n' in text
    assert check(here) == []
    new("component", "third", "--like", "first")
    check_style(here)
    run_test(here, "tests/test_third.py")


def test_a_configuration_that_cannot_be_edited_line_by_line(here: Path) -> None:
    write_leaf(here, "dense", "X FP32 4; Z FP32 4", "Y FP32 4")
    config = here / "preprocess" / "dense" / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('name: "dense"\n', "# nameless\n")
    config.write_text(text, encoding="utf-8")
    draft_like("copy", "dense", inputs=[parse_tensor("Z:FP32:9", "")], project=here).draft.write()
    copy = read_config(here / "preprocess" / "copy")
    assert copy.name == "copy"
    assert [t.dims for t in copy.spec.inputs] == [(4,), (9,)]


def test_further_inputs_where_they_are_alike(tmp_path: Path) -> None:
    more = [parse_tensor(f"{name}:FP32:-1", "") for name in ("THIRD", "FOURTH")]
    draft_like("vote", "blend", settings={"weights": "[1, 2, 3, 6]"}, inputs=more, project=tmp_path).draft.write()
    copy = read_config(tmp_path / "postprocess" / "vote")
    assert [tensor.name for tensor in copy.spec.inputs] == ["FIRST", "SECOND", "THIRD", "FOURTH"]
    text = (copy.folder / "config.pbtxt").read_text(encoding="utf-8")
    assert "  # as FIRST\n" in text, "the comments stay"
    repository = shoal.compose("vote_alone", tmp_path / "build" / "r", projects=[tmp_path])
    pipeline = shoal.load(repository / "vote_alone")
    columns = {tensor.name: np.full((1, 1), i, np.float32) for i, tensor in enumerate(copy.spec.inputs)}
    np.testing.assert_array_equal(pipeline(**columns)["BLEND"], np.array([[26 / 12]], np.float32))
    pipeline.close()


def test_artifacts_of_a_copy(here: Path) -> None:
    more = 'parameters { key: "artifacts" value { string_value: "a.txt b.txt c.txt?" } }\n'
    write_leaf(here, "reader", "X FP32 4", "Y FP32 4", more=more)
    (here / "a.txt").write_text("a", encoding="utf-8")
    printed = new("component", "copy", "--like", "reader", "--artifact", "a.txt=a.txt")
    assert (
        "Before it is tested or served, put b.txt into preprocess/copy/1, as --artifact b.txt=PATH does.\n" in printed
    )
    assert (here / "preprocess/copy/1/a.txt").read_text(encoding="utf-8") == "a"
    assert check(here) == []
    with pytest.raises(ShoalError, match=r"b\.txt"):
        shoal.compose("copy_alone", here / "r", projects=[here])
    (here / "preprocess/copy/1/b.txt").touch()
    shoal.compose("copy_alone", here / "r", projects=[here])


PIECES = {
    "blend": {"weights": "[1, 3]"}, "label": {"labels": '["a", "b", "c"]'}, "l2_normalise": {}, "softmax": {},
    "threshold": {"threshold": "0.7"}, "top_k": {"labels": '["a", "b", "c", "d", "e"]', "k": "2"},
}  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_configured_piece_answers_what_its_test_asks(tmp_path: Path, piece: str) -> None:
    made = draft_like("mine", piece, settings=PIECES[piece], project=tmp_path)
    made.draft.write()
    asked = runpy.run_path(str(tmp_path / made.test))["REQUEST"]
    repository = shoal.compose(made.pipeline, tmp_path / "build" / "r", projects=[tmp_path])
    pipeline = shoal.load(repository / made.pipeline)
    assert all(len(array) == 2 for array in pipeline(**asked).values())
    pipeline.close()


def test_a_configured_piece_is_served(here: Path) -> None:
    (here / "scale.json").write_text('{"mean": [1, 2, 3], "std": [1, 2, 1]}', encoding="utf-8")
    new("component", "scale", "--like", "zscore", "--artifact", "zscore.json=scale.json", "--input", "X:FP32:-1")
    assert '"X": RANDOM.random((2, 3)).astype(np.float32)' in (here / "tests/test_scale.py").read_text(encoding="utf-8")
    assert check(here) == []
    run_test(here, "tests/test_scale.py")


def test_one_of_two_artifacts(here: Path) -> None:
    printed = new("component", "tokens", "--like", "tokenizer")
    wanted = "put vocab.txt or tokenizer.json into preprocess/tokens/1, as --artifact vocab.txt=PATH does."
    assert f"Before it is tested or served, {wanted}\n" in printed
    with pytest.raises(ShoalError, match=r"Artifacts are missing: vocab\.txt or tokenizer\.json of tokens\."):
        shoal.compose("tokens_alone", here / "r", projects=[here])
    trained = here / "trained"
    trained.mkdir()
    (trained / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n", encoding="utf-8")
    repository = shoal.compose("tokens_alone", here / "r", artifacts=trained, projects=[here])
    assert (repository / "tokens/1/vocab.txt").is_file()
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(here / "preprocess/tokens/1/tokenizer.json"))
    repository = shoal.compose("tokens_alone", here / "r", artifacts=trained, projects=[here])
    assert not (repository / "tokens/1/vocab.txt").exists(), "the leaf's own goes before"
    pipeline = shoal.load(repository / "tokens_alone")
    assert pipeline(TEXT=np.array([[b"?"]], np.object_))["attention_mask"].sum() == 1
    pipeline.close()


def test_a_name_with_a_dot(here: Path) -> None:
    """As Triton takes it: in a component, a copy, and a pipeline whose --map names both."""
    new("component", "gpt3_1.3b")
    new("component", "up-2.x", "--like", "softmax", "--input", "LOGITS:FP32:3", "--output", "PROBABILITIES:FP32:3")
    new("pipeline", "both.1", "--step", "gpt3_1.3b", "--map", "gpt3_1.3b.TEXT=PROMPT")
    assert {"tests/test_gpt3_1_3b.py", "tests/test_up_2_x.py", "tests/test_both_1.py"} <= files(here)
    assert run("check", ".").stdout == "No mistakes found.\n"
    run_test(here, "tests/test_both_1.py")


def test_engine_arguments_of_a_copy(here: Path) -> None:
    new("component", "fast", "--like", "vllm", "--set", "max_num_seqs=4", "--set", "enforce_eager=true",
        "--set", "quantization=awq")  # fmt: skip
    made = json.loads((here / "models/fast/1/model.json").read_bytes())
    own = json.loads((ROOT / "models/vllm/1/model.json").read_bytes())
    assert made == own | {"max_num_seqs": 4, "enforce_eager": True, "quantization": "awq"}
    assert check(here) == []


def test_every_leaf_of_shoals_own_can_be_copied(tmp_path: Path) -> None:
    leaves = [leaf for leaf in find_model_folders().values() if not leaf.is_ensemble]
    for leaf in leaves:
        if wants(leaf) or leaf.backend == "vllm":  # they need the weights of a language model
            continue
        name = f"my_{leaf.name}"
        draft_like(name, leaf.name, project=tmp_path).draft.write()
        copied, original = (
            (folder / "config.pbtxt").read_text(encoding="utf-8")
            for folder in (tmp_path / leaf.folder.parent.name / name, leaf.folder)
        )
        assert copied == original.replace(f'name: "{leaf.name}"\n', f'name: "{name}"\n', 1)
    assert check(tmp_path) == []
    check_style(tmp_path)
