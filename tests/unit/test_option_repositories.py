"""Options of the commands that write, check and show model folders and repositories: each value is obeyed.

A line for each option: what the lines of both values have in common, the one value, the other, and optionally the files
in which the difference must be seen. ``world`` has the files that the lines name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shoal.authoring.environment.archive import unpack
from tests.support.imports import script
from tests.support.once import ROOT
from tests.support.options import PRINTED, Both, Elsewhere, Net, Shoal, Table, check_both, check_steady, rows
from tests.support.planted_environments import PYTHON, environment, stub
from tests.support.projects import write_model
from tests.support.tokenizers import byte_level

COMPOSE = "compose pair repository --project p"
PLAN = "plan pair --project p"
COMPONENT, MODEL, PIPELINE = "new component mine", "new model mine", "new pipeline mine"
TABLE: Table = {
    "compose --artifacts": Both("compose bare repository --project p", "--artifacts one", "--artifacts two", "*.pt"),
    "compose --placement": Both(f"{COMPOSE} --target 26.06", "--placement cpu", "--placement gpu", "*/a/config.pbtxt"),
    "compose --target": Both("compose net repository --project p", "", "--target 26.06", "*/config.pbtxt"),
    "compose --dtype": Both("compose net repository --project p", "--dtype fp32", "--dtype bf16", "*/config.pbtxt"),
    "compose --gpu": Both(f"{COMPOSE} --target 26.06 --placement gpu", "--gpu 0", "--gpu 1,2", "*/a/config.pbtxt"),
    "compose --place": Both(f"{COMPOSE} --target 26.06", "", "--place a=gpu:0", "*/a/config.pbtxt"),
    "compose --reserve-requests": Both(
        f"{COMPOSE} --target 26.06 --placement gpu",
        "--reserve-requests 1",
        "--reserve-requests 9999999",
        "*/manifest.json",
    ),
    "compose --project": Both("compose pair repository --project p", "", "--project q", "*/a/1/model.py"),
    "compose --env": Both(COMPOSE, "--env env.tar.gz", "--env a=env.tar.gz", "*/config.pbtxt"),
    "compose --stub": Both(f"{COMPOSE} --env env", "--stub stub", "--stub a=stub", "*stub"),
    "compose --swap": Both(COMPOSE, "", "--swap b=b2", "*/pair/config.pbtxt"),
    "compose --weights": Both("compose prompt repository", "--weights tiny", "--weights other", "*/config.pbtxt"),
    "compose --instances": Both(COMPOSE, "--instances a=1", "--instances a=3", "*/a/config.pbtxt"),
    "compose --preferred-batch": Both(COMPOSE, "--preferred-batch a=2", "--preferred-batch a=4,8", "*/a/config.pbtxt"),
    "compose --queue-delay": Both(COMPOSE, "--queue-delay a=0", "--queue-delay a=300", "*/a/config.pbtxt"),
    "compose --together": Elsewhere("unit/test_together.py::test_the_models_travel_in_their_callers_folder"),
    "plan --placement": Both(PLAN, "--placement cpu", "--placement gpu"),
    "plan --target": Both("plan ensemble_all", "--target embedded", "--target 26.06"),
    "plan --gpu": Both(f"{PLAN} --placement gpu", "--gpu 0", "--gpu 1,2"),
    "plan --reserve-requests": Both(f"{PLAN} --placement gpu", "--reserve-requests 1", "--reserve-requests 999"),
    "plan --text-bytes": Both("plan ensemble_all", "--text-bytes 10", "--text-bytes 999999"),
    "plan --project": Both(PLAN, "", "--project q"),
    "plan --weights": Elsewhere("slow/test_quantised.py::test_plan_adds_up_and_refuses_what_does_not_fit"),
    "plan --quantize": Elsewhere("slow/test_quantised.py::test_plan_adds_up_and_refuses_what_does_not_fit"),
    "plan --gpu-memory": Elsewhere("slow/test_quantised.py::test_plan_adds_up_and_refuses_what_does_not_fit"),
    "compose --quantize": Elsewhere("slow/test_openvino_engine.py::test_the_export_is_made_once_for_the_same_files"),
    "compose --engine": Both(
        "compose llm repository --weights tiny", "--engine hf", "--engine vllm", "*/llm/config.pbtxt"
    ),
    "plan --engine": Both("plan llm --weights tiny", "--engine hf", "--engine vllm"),
    "plan --json": Both(PLAN, "", "--json"),
    "compose --tuned": Elsewhere("slow/test_tune.py::test_the_plan_decides_for_auto"),
    "compose --accept-error": Elsewhere("slow/test_tune.py::test_a_large_or_unknown_error_is_refused"),
    "tune --artifacts": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --data": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --text-column": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --target-column": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --output": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --out": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --json": Elsewhere("slow/test_tune.py::test_every_option_is_obeyed"),
    "tune --seconds": Elsewhere("slow/test_tune.py::test_more_time_measures_more_texts"),
    "fill --in_place": Elsewhere("unit/test_fill.py::test_a_template_is_filled"),
    "fill --keep-unset": Both("fill blank.pbtxt rows:8", "", "--keep-unset"),
    "fill --dry-run": Both("fill blank.pbtxt rows:8,dir:/a", "", "--dry-run"),
    "check --target": Both("check forest", "--target embedded", "--target 25.08"),
    "check --strict": Both("check warned", "", "--strict"),
    "check --load": Elsewhere("slow/test_check_load.py::test_the_command_loads_two_repositories_together"),
    "check --explain": Both("check", "--explain tensor-dims", "--explain parameter-misspelt"),
    "check --format": Both("check warned", "--format text", "--format sarif"),
    "check --json": Both("check warned", "", "--json"),
    "graph --format": Both("graph p/ensembles/pair", "--format mermaid", "--format svg"),
    "graph --out": Both("graph p/ensembles/pair", "--out one.mmd", "--out two.svg"),
    "graph --model": Both("graph p/ensembles", "--model pair", "--model twice"),
    "describe --model": Both("describe p/ensembles", "--model pair", "--model twice"),
    "describe --json": Both("describe p/ensembles/pair", "", "--json"),
    "new component --input": Both(COMPONENT, "", "--input A:FP32:3"),
    "new component --output": Both(COMPONENT, "", "--output A:FP32:3"),
    "new component --category": Both(COMPONENT, "", "--category postprocess"),
    "new component --like": Both(COMPONENT, "", "--like softmax"),
    "new component --set": Both(f"{COMPONENT} --like top_k", "--set k=1", "--set k=2"),
    "new component --artifact": Both(f"{COMPONENT} --like zscore", "", "--artifact zscore.json=zscore.json"),
    "new component --streaming": Both(COMPONENT, "", "--streaming"),
    "new component --project": Both(COMPONENT, "", "--project here"),
    "new component --dry-run": Both(COMPONENT, "", "--dry-run"),
    "new model --features": Both(MODEL, "--features 2", "--features 3"),
    "new model --project": Both(f"{MODEL} --features 2", "", "--project here"),
    "new model --dry-run": Both(f"{MODEL} --features 2", "", "--dry-run"),
    "new pipeline --step": Both(PIPELINE, "", "--step softmax"),
    "new pipeline --map": Both(f"{PIPELINE} --step blend", "--map blend.SECOND=A", "--map blend.SECOND=B"),
    "new pipeline --project": Both(PIPELINE, "", "--project here"),
    "new pipeline --dry-run": Both(PIPELINE, "", "--dry-run"),
    "env inspect --json": Both("env inspect env.tar.gz", "", "--json"),
    "env fit --stub": Both("env fit env", "", "--stub stub --target 26.06"),
    "env fit --target": Both("env fit numpy-2.tar.gz", "", "--target 26.06"),
    "env fit --json": Both("env fit numpy-2.tar.gz", "", "--json"),
    "serve --print": Both("serve warned", "--print", "--print-config"),
    "serve --bare": Both("serve forest --print --no-check", "", "--bare"),
    "serve --target": Both("serve forest --print --no-check", "--target 26.06", "--target 25.08"),
    "serve --cache-mib": Both("serve forest --print --no-check", "--cache-mib 1", "--cache-mib 2"),
    "serve --print-config": Both("serve warned --http-port 1", "--print", "--print-config"),
    "serve --config": Both("serve warned --print-config", "--config one.toml", "--config two.toml"),
    "doctor --keys": Both("doctor --json", "", "--keys none.json", PRINTED),
    "doctor --json": Both("doctor", "", "--json"),
    "--version": Both("", "doctor --json", "--version"),
}


CONFIG = 'parameters { key: "artifacts" value { string_value: "model.pt" } }\n'


def write_project(root: Path, value: str) -> None:
    x, y = ["X", "FP32", [3]], ["Y", "FP32", [3]]
    for name in ("a", "b", "b2"):
        write_model(root / "models", name, [x], [y])
    for name in ("net", "bare"):
        write_model(root / "models", name, [x], [y])
        path = root / "models" / name / "config.pbtxt"
        path.write_text(path.read_text().replace("python", "pytorch") + CONFIG)
        (root / "models" / name / "1" / "model.py").unlink()
    path = root / "models" / "a" / "1" / "model.py"
    path.write_text(path.read_text() + f"# {value}\n")
    folder = root / "ensembles" / "pair"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(PAIR.replace("ROWS", "8" if value == "p" else "4"))


PAIR = """
name: "pair" platform: "ensemble" max_batch_size: ROWS
input [ { name: "X" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 3 ] } ]
ensemble_scheduling {
  step [
    { model_name: "a" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "t" } },
    { model_name: "b" model_version: -1 input_map { key: "X" value: "t" } output_map { key: "Y" value: "Y" } }
  ]
}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name in ("p", "q"):
        write_project(root / name, name)
    for seed, name in enumerate(("one", "two")):
        (root / name).mkdir()
        torch.manual_seed(seed)
        script(Net(), root / name / "model.pt")
    shutil.copy(root / "one" / "model.pt", root / "p" / "models" / "net" / "1")
    for name in ("tiny", "other"):
        (root / name).mkdir()
        byte_level().save(str(root / name / "tokenizer.json"))
        (root / name / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 64}')
        (root / name / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (root / "blank.pbtxt").write_text('max_batch_size: ${rows} default_model_filename: "${dir}"\n')
    (root / "env.tar.gz").write_bytes(environment())
    (root / "numpy-2.tar.gz").write_bytes(environment(numpy="2.1.0"))
    unpack(root / "env.tar.gz", root / "env")
    (root / "env" / "lib" / f"libpython{PYTHON}.so.1.0").touch()
    write_model(root / "warned", "model", [["X", "FP32", [3]]], [["Y", "FP32", [3]]])
    path = root / "warned" / "model" / "config.pbtxt"
    path.write_text(path.read_text() + CONFIG.replace("artifacts", "artifact"))
    (root / "forest" / "cuml").mkdir(parents=True)
    text = (ROOT / "models" / "cuml" / "config.pbtxt").read_text()
    (root / "forest" / "cuml" / "config.pbtxt").write_text(
        text.replace("output_class", "is_classifier") + "response_cache { enable: true }"
    )
    (root / "one.toml").write_text("http-port = 1")
    (root / "two.toml").write_text("http-port = 2")
    (root / "zscore.json").write_text('{"mean": [1], "std": [2]}')
    (root / "stub").write_bytes(stub())
    return root


@pytest.fixture(scope="module")
def shoal(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Shoal:
    return Shoal(world, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("entry", rows(TABLE))
def test_two_values_give_two_results(entry: Both, shoal: Shoal) -> None:
    check_both(shoal, entry)


def test_weights_that_no_model_takes_are_refused(shoal: Shoal) -> None:
    assert "have no effect: no model has an empty parameter model." in shoal(f"{COMPOSE} --weights tiny")[PRINTED]


def test_one_value_gives_one_result(shoal: Shoal) -> None:
    check_steady(shoal, TABLE)
