"""Configurations, graphs, leaves, placement and composing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shoal.component.bundle import sha256
from shoal.errors import ArtifactError, InputError
from shoal.repository import compose as composing
from shoal.repository import paths
from shoal.repository.compose import MANIFEST, compose, read_manifest
from shoal.repository.graph import Graph
from shoal.repository.leaves import collect, find_leaves, shipped_root
from shoal.repository.pbtxt import read_config, write_config
from shoal.repository.placement import PYTHON_BASED_BACKENDS, Plan, place
from shoal.serving.runtime import BACKENDS
from tests.conftest import ROOT

MODELS = {"preprocess", "bert-large", "cuml", "postprocess", "ensemble_all"}


def files(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): sha256(p)
        for p in sorted(folder.rglob("*"))
        if p.is_file() and "__pycache__" not in p.parts
    }


# --- configurations and graphs -----------------------------------------------------------------------------------


def test_a_configuration_as_records() -> None:
    config = read_config(ROOT / "preprocess" / "readability")
    assert (config.name, config.backend, config.spec.max_batch_size) == ("preprocess", "python", 512)
    assert [(t.name, t.dtype, t.dims) for t in config.spec.outputs] == [
        ("BERT_IDS", "TYPE_INT64", (-1,)),
        ("BERT_AM", "TYPE_INT64", (-1,)),
        ("TREE_FEATS", "TYPE_FP32", (207,)),
    ]
    assert config.artifacts == (("preprocess.json", True), ("vocab.txt", True))
    post = read_config(ROOT / "postprocess" / "readability")
    assert post.artifacts == (("postprocess.json", False),)
    assert [t.is_optional for t in post.spec.inputs] == [True, False, False]


def test_written_configurations_read_the_same(tmp_path: Path) -> None:
    for leaf in find_leaves().values():
        write_config(leaf.message, tmp_path / "config.pbtxt", comment="é")
        again = read_config(tmp_path)
        assert (again.spec, again.steps, again.backend) == (leaf.spec, leaf.steps, leaf.backend)


def test_faults_name_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('name: "x"\nmax_batch: 3\n', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"config\.pbtxt:2:1 : .*max_batch"):
        read_config(tmp_path)
    with pytest.raises(ArtifactError, match="is no model folder"):
        read_config(tmp_path / "nowhere")


def test_a_nameless_configuration_is_named_after_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('backend: "python"\n', encoding="utf-8")
    assert read_config(tmp_path).name == tmp_path.name


def test_names_are_the_source_documents() -> None:
    """Models, tensors and the maps between them, as published."""
    graph = Graph.build(find_leaves()["ensemble_all"], find_leaves())
    tensors = {
        name: ([t.name for t in c.spec.inputs], [t.name for t in c.spec.outputs]) for name, c in graph.members.items()
    }
    assert tensors == {
        "preprocess": (["INPUT0"], ["BERT_IDS", "BERT_AM", "TREE_FEATS"]),
        "bert-large": (["INPUT__0", "INPUT__1"], ["OUTPUT__0"]),
        "cuml": (["input__0"], ["output__0"]),
        "postprocess": (
            ["BERT_WEIGHT_INPUT", "BERT_LARGE_SCORE", "CUML_SCORE"],
            ["OUTPUT0", "BERT_SCORE", "FOREST_SCORE"],
        ),
        "ensemble_all": (["excerpt", "BERT_WEIGHT"], ["SCORE", "BERT_SCORE", "FOREST_SCORE"]),
    }
    assert {e.name for e in graph.edges() if e.target is not None} == {
        "excerpt", "BERT_WEIGHT", "bert_input_ids", "bert_attention_masks", "tree_feats", "bert_large_score",
        "cuml_score",
    }  # fmt: skip
    assert all(step.version == 1 for step in graph.steps)


def test_a_mapping_to_a_tensor_that_is_not_there(repository: Path, tmp_path: Path) -> None:
    for direction, name in (("to non-existing input", "input__0"), ("from non-existing output", "output__0")):
        copy = tmp_path / name
        shutil.copytree(repository, copy)
        config = copy / "ensemble_all" / "config.pbtxt"
        config.write_text(config.read_text(encoding="utf-8").replace(f'"{name}"', '"NOPE"'), encoding="utf-8")
        with pytest.raises(ArtifactError, match=f"mapp(ing|ed) {direction} NOPE in model cuml. Model cuml has: {name}"):
            Graph.load(copy / "ensemble_all")


def test_a_single_model_is_a_graph_of_one_step(repository: Path) -> None:
    graph = Graph.load(repository / "cuml")
    assert [step.model for step in graph.steps] == ["cuml"]
    assert 's0 -->|"output__0<br/>FP32 [1]"| answer' in graph.mermaid()


# --- leaves and placement ----------------------------------------------------------------------------------------


def test_collect_brings_members_before_ensembles() -> None:
    names = [config.name for config in collect("ensemble_all", find_leaves())]
    assert set(names) == MODELS
    assert names[-1] == "ensemble_all"
    with pytest.raises(ArtifactError, match=r"There is no model nope\. Known: bert-large, cuml, ensemble_all"):
        collect("nope", find_leaves())


def test_a_users_leaf_takes_the_place_of_ours(tmp_path: Path) -> None:
    mine = tmp_path / "models" / "mine"
    mine.mkdir(parents=True)
    (mine / "config.pbtxt").write_text('name: "cuml"\nbackend: "python"\n', encoding="utf-8")
    assert find_leaves([tmp_path])["cuml"].backend == "python"
    assert shipped_root() == ROOT


def test_targets_differ_in_the_lines_of_python_based_backends_only() -> None:
    leaves = find_leaves()
    assert {p.name for p in BACKENDS.iterdir() if (p / "model.py").is_file()} == set(PYTHON_BASED_BACKENDS)
    for name in MODELS:
        embedded, native = (place(leaves[name], Plan(target=target)) for target in ("embedded", "26.06"))
        if name in ("bert-large", "cuml"):
            assert (embedded.runtime, native.runtime) == ("model.py", "")
            embedded.runtime = ""
            for tensor in embedded.input:
                assert tensor.allow_ragged_batch == (name == "bert-large")
                tensor.allow_ragged_batch = False
        assert embedded == native
        kinds = [group.kind for group in embedded.instance_group]
        assert kinds == ([] if name == "ensemble_all" else [embedded.instance_group[0].KIND_CPU])


def test_dtype_is_the_encoders() -> None:
    leaves = find_leaves()
    placed = {name: place(leaves[name], Plan(dtype="bf16")) for name in MODELS}
    assert {name for name, message in placed.items() if "dtype" in message.parameters} == {"bert-large"}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"placement": "moon"}, "There is no placement 'moon'. Known: cpu"),
        ({"dtype": "fp8"}, "There is no dtype 'fp8'. Known: fp32, bf16"),
        ({"target": "latest"}, "There is no target 'latest'. Known: embedded, or a release"),
        ({"target": "26.06", "dtype": "bf16"}, "The native backends of 26.06"),
    ],
)
def test_plans_that_cannot_be(fault: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Plan(**fault)


# --- composing ---------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bytes(repository: Path, artifacts: Path, tmp_path: Path) -> None:
    assert files(compose("ensemble_all", tmp_path / "again", artifacts=artifacts)) == files(repository)


def test_the_manifest_lists_every_file(repository: Path) -> None:
    manifest = read_manifest(repository)
    present = files(repository)
    del present[MANIFEST]
    assert manifest["files"] == present
    assert (manifest["ensemble"], manifest["placement"], manifest["target"]) == ("ensemble_all", "cpu", "embedded")
    assert "MiniLM" in read_config(repository / "bert-large").spec.parameters["content"]
    assert read_manifest(repository / "cuml") == {}


def test_only_what_runs_in_a_model_is_copied_beside_it(repository: Path) -> None:
    copied = {p.name for p in (repository / "preprocess" / "1" / "shoal").iterdir()}
    assert copied == {"__init__.py", "errors.py", "component"}
    assert not (repository / "bert-large" / "train.py").exists()
    assert (repository / "ensemble_all" / "1" / ".gitkeep").exists()


def test_an_interrupted_compose_leaves_the_old_repository_whole(
    artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = compose("ensemble_all", tmp_path / "repository", artifacts=artifacts)
    before = files(target)
    for step in ("_write_model", "check_artifacts", "_write_manifest", "exchange"):
        with monkeypatch.context() as patch:
            patch.setattr(composing, step, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                compose("ensemble_all", target, artifacts=artifacts, plan=Plan(target="26.06"))
        assert files(target) == before
        assert [p.name for p in tmp_path.iterdir()] == ["repository"]
    compose("ensemble_all", target, artifacts=artifacts, plan=Plan(target="26.06"))
    assert read_manifest(target)["target"] == "26.06"
    assert [p.name for p in tmp_path.iterdir()] == ["repository"]


def test_what_shoal_did_not_make_is_not_replaced(artifacts: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    for target in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(InputError, match="shoal did not make it"):
            compose("ensemble_all", target, artifacts=artifacts)
    assert (tmp_path / "mine" / "thesis.txt").read_text(encoding="utf-8") == "years of work"


def test_missing_artifacts_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"lacks checkpoint\.tl, model\.pt, preprocess\.json, vocab\.txt\. Make them"
    ):
        compose("ensemble_all", tmp_path / "repository", artifacts=tmp_path)
    assert not (tmp_path / "repository").exists()


def test_a_forest_of_another_bundle_is_refused(artifacts: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(artifacts, mixed)
    bundle = json.loads((mixed / "preprocess.json").read_text(encoding="utf-8"))
    bundle["mean"][0] += 1
    (mixed / "preprocess.json").write_text(json.dumps(bundle), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"checkpoint\.tl was made with another preprocess\.json"):
        compose("ensemble_all", tmp_path / "repository", artifacts=mixed)


@pytest.mark.parametrize("name", ["with blank", "semi;colon", "dollar$", "quote'", "café"])
def test_paths_that_triton_cannot_bear(artifacts: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="Triton cannot bear the path"):
        compose("ensemble_all", tmp_path / name, artifacts=artifacts)


def test_exchange_without_the_kernels_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = tmp_path / "made", tmp_path / "target"
    made.mkdir()
    target.mkdir()
    (made / "new").touch()
    (target / "old").touch()
    monkeypatch.setattr(paths, "_RENAME_EXCHANGE", 1 << 20)  # a flag that no kernel knows
    paths.exchange(made, target)
    assert (target / "new").exists()
    assert (made / "old").exists()
    assert len(list(tmp_path.iterdir())) == 2
