"""Each model on each kind of device: it computes there, or is refused; and what compose says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from shoal.authoring.check.families import check
from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.config import ModelConfig, as_config, read_config
from shoal.authoring.repository.devices import find_host_reason, gpus_of, show_groups
from shoal.authoring.repository.find_graph import find_model_folders
from shoal.authoring.repository.loading import component_class
from shoal.authoring.repository.manifest import read_manifest
from shoal.authoring.repository.model_code import find_constants
from shoal.authoring.repository.placement import place
from shoal.authoring.repository.plan import Instances, Plan, Tuning
from shoal.clients import local
from shoal.errors import InputError, SetupError, ShoalError
from shoal.kit.backends import BACKENDS
from shoal.kit.component.base import Component
from shoal.kit.component.context import Context
from shoal.kit.component.spec import ENGINE_LIBRARY, HOST_LIBRARY
from shoal.kit.component.tensors import Device
from shoal.kit.generation.engines import vllm
from shoal.readability.preprocess_config import Bundle
from tests.support.commands import Shoal
from tests.support.fake_triton import Stub
from tests.support.planted import write
from tests.support.pretend import PretendGpu
from tests.support.tokenizers import byte_level

SHIPPED = {name: config for name, config in find_model_folders().items() if not config.is_ensemble}
PYTHON = sorted(name for name, config in SHIPPED.items() if config.backend == "python" and not config.requires)
ON_HOST = {
    "checked_text", "completion", "image", "label", "llm-onnx", "llm_bls", "pair_tokenizer",
    "postprocessing", "preprocessing", "prompt", "tensorrt_llm_bls", "tokenizer", "top_k", "word_counts",
}  # fmt: skip
NVIDIAS = {"tensorrt_llm", "trtllm-llmapi", "vllm"}  # on backends, or with code, that are not here
GPUS = Plan(placement="gpu", gpus=(0, 1))


def shipped_class(name: str) -> type[Component]:
    config = SHIPPED[name]
    return component_class(
        (BACKENDS / config.backend if config.backend != "python" else config.folder / "1") / "model.py"
    )


@pytest.fixture
def has_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with CuPy, and with a stub for it: the embedded server has none by itself."""
    monkeypatch.setattr("shoal.authoring.check.targets.explain_cupy", lambda name: None)


# --- every model, every kind -----------------------------------------------------------------------------------------


def test_what_is_known_of_the_code_is_what_the_code_does() -> None:
    """The rules and compose read `library` from the text; the class itself decides when it starts."""
    for name in PYTHON:
        library = shipped_class(name).library
        assert (library == HOST_LIBRARY) == bool(find_host_reason(SHIPPED[name], "embedded")) == (name in ON_HOST)
    assert shipped_class("llm-vllm").library == ENGINE_LIBRARY


@pytest.mark.parametrize("name", sorted(SHIPPED.keys() - NVIDIAS))
def test_a_model_starts_on_a_device_only_if_it_computes_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPU 2 of three, and with KIND_MODEL: `prepare` selects that GPU, or the model does not start."""
    selected: list[int] = []

    def prepare(index: int) -> int:
        selected.append(index)
        return 3

    for library in ("cupy", "torch"):
        monkeypatch.setattr(f"shoal.kit.component.tensors._prepare_{library}", prepare)
    library = shipped_class(name).library
    for kind in ("CPU", "GPU", "MODEL"):
        args = {"model_instance_kind": kind, "model_instance_device_id": "2"}
        device = Device.from_triton(args, library)
        is_refused = library != ENGINE_LIBRARY and (kind == "MODEL" or (kind == "GPU" and library == HOST_LIBRARY))
        if is_refused:
            with pytest.raises(
                SetupError, match=f"Its instance has KIND_{kind}, and the component computes with KIND_CPU"
            ):
                device.prepare()
        else:
            device.prepare()
        assert device.is_host == (kind == "CPU" or library == ENGINE_LIBRARY)
    assert selected == ([2] if library in ("cupy", "torch") else [])


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_compose_and_check_place_a_model_only_where_it_starts(name: str, tmp_path: Path) -> None:
    """All shipped models, placed by hand on each kind: `check` reports just those that would not start."""
    config, library = SHIPPED[name], "" if name in NVIDIAS else shipped_class(name).library
    for kind in ("KIND_CPU", "KIND_GPU", "KIND_MODEL"):
        message = type(config.message)()
        message.CopyFrom(config.message)
        group = message.instance_group[0]
        group.kind = getattr(group, kind)
        folder = tmp_path / kind / name
        write(folder / "config.pbtxt", str(message))
        (folder / "1").mkdir()
        if config.backend == "python":
            write(folder / "1" / "model.py", (config.folder / "1" / "model.py").read_text(encoding="utf-8"))
        found = [f for f in check(tmp_path / kind, target="embedded") if f.rule.id == "kind-unsupported"]
        is_wrong = kind == "KIND_MODEL" or (kind == "KIND_GPU" and library == HOST_LIBRARY)
        assert bool(found) == (is_wrong and library not in ("", ENGINE_LIBRARY) and kind != "KIND_CPU"), kind
    kinds = {group.kind for group in place(config, GPUS).instance_group}
    assert (kinds == {group.KIND_CPU}) == (library == HOST_LIBRARY)


@pytest.mark.parametrize("index", [0, 3])
def test_stateless_components_compute_on_the_gpu_of_their_instance(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their outputs are arrays of that device, for the models whose answer is not a text."""
    write(tmp_path / "1" / "zscore.json", json.dumps({"mean": [1, 2], "std": [2, 4]}))
    scores = np.array([[3, 4], [5, 0]], np.float32)
    monkeypatch.setattr(Device, "from_triton", classmethod(lambda cls, args, library: PretendGpu(index=index)))
    for name in ("zscore", "softmax", "l2_normalise", "threshold", "blend"):
        config = SHIPPED[name]
        component = shipped_class(name)(
            Context(spec=config.spec, folder=tmp_path / "1", device=PretendGpu(index=index))
        )
        given = {tensor.name: torch.from_numpy(scores) for tensor in config.spec.inputs}
        host = shipped_class(name)(Context(spec=config.spec, folder=tmp_path / "1"))
        there = component.run(given)
        here = host.run({key: np.array(value) for key, value in given.items()})
        assert all(isinstance(array, torch.Tensor) for array in there.values()), name
        for key in here:
            np.testing.assert_allclose(np.array(there[key]), here[key], rtol=1e-6)


def test_kind_model_is_refused_in_this_process_as_well(tmp_path: Path) -> None:
    config = SHIPPED["softmax"]
    message = place(config, Plan())
    message.instance_group[0].kind = message.instance_group[0].KIND_MODEL
    assert local._device(as_config(message, config.folder), "cupy") == Device("model", 0, "cupy")
    with pytest.raises(SetupError, match="KIND_MODEL, and the component computes with KIND_CPU or KIND_GPU only"):
        Stub(shipped_class("softmax"), tmp_path, {"name": "softmax"}, kind="MODEL")


def test_code_that_cannot_be_parsed_says_nothing() -> None:
    assert find_constants("class A:\n    library = 'numpy'\n", "library") == ("numpy",)
    assert find_constants("class A:\n    library: str = 'numpy'\n", "library") == ("numpy",)
    for text in ("class A(:\n    library = 'numpy'\n", "\0library", "library = 'numpy'", "[" * 10_000 + "library"):
        assert find_constants(text, "library") == ()


# --- compose ---------------------------------------------------------------------------------------------------------

MINE = """name: "mine"
backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 1 ] }, { count: 1 kind: KIND_CPU } ]
"""
CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        return requests\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    write(tmp_path / "models/mine/config.pbtxt", MINE)
    write(tmp_path / "models/mine/1/model.py", CODE)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "groups", "gpus", "placement"),
    [
        ([], "2 on GPU 1, 1 on the host", [1], "mixed"),
        (["--placement", "cpu"], "2 on the host, 1 on the host", [], "cpu"),
        (["--placement", "gpu"], "2 on GPU 0, 1 on GPU 0", [0], "gpu"),
        (["--placement", "gpu", "--gpu", "2,3"], "2 on GPU 2 and 3, 1 on GPU 2 and 3", [2, 3], "gpu"),
        (["--place", "mine=cpu"], "2 on the host", [], "cpu"),
        (["--place", "mine=gpu:0,2"], "2 on GPU 0 and 2", [0, 2], "mixed"),
        (["--placement", "gpu", "--place", "mine=gpu:3"], "2 on GPU 3", [3], "mixed"),
        (["--place", "mine=gpu:3", "--instances", "mine=5"], "5 on GPU 3", [3], "mixed"),
        (["--instances", "mine=3"], "3 on GPU 1", [1], "mixed"),
    ],
)
def test_own_groups_are_kept_unless_an_option_replaces_them(
    options: list[str], groups: str, gpus: list[int], placement: str, mine: Path, shoal: Shoal
) -> None:
    result = shoal("compose", "mine", mine / "r", "--project", mine, *options)
    message, manifest = read_config(mine / "r" / "mine").message, read_manifest(mine / "r")
    assert show_groups(message) == groups
    assert (manifest["gpus"], manifest["placement"]) == (gpus, placement)
    pools = [flag for flag in manifest["launch"]["flags"] if flag.startswith("--cuda-memory-pool")]
    assert [flag.partition("=")[2].partition(":")[0] for flag in pools] == list(map(str, gpus))
    note = f"note: mine/config.pbtxt: instance_group 2 on GPU 1, 1 on the host -> {groups}"
    assert (note in result) == bool(options)
    assert "FORCE_CPU_ONLY_INPUT_TENSORS" not in message.parameters, "it is not a component of shoal"


def test_what_composing_changed_of_ones_own_files_is_said(mine: Path, shoal: Shoal) -> None:
    """A value that the user wrote and that is another one now; not what is only added."""
    path = mine / "models/mine/config.pbtxt"
    path.write_text(MINE + 'parameters { key: "content" value { string_value: "mine" } }\n', encoding="utf-8")
    write(mine / "made/report.json", json.dumps({"contents": {"mine": "of the report"}}))
    result = shoal("compose", "mine", mine / "r", "--project", mine, "--artifacts", mine / "made")
    assert [line for line in result.splitlines() if line.startswith("note")] == [
        "note: mine/config.pbtxt: content mine -> of the report"
    ]


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("label=gpu:0", r"label cannot be placed on GPU 0: its code computes on the host only\.\s+Say --place label"),
        ("label=gpu:", "--place label=gpu: cannot be read. For example: --place scorer=gpu:0, or scorer=cpu"),
        ("label=cuda:0", "--place label=cuda:0 cannot be read"),
        ("lable=cpu", "There is no model lable in this repository. Did you mean label"),
        ("softmax=gpu:0 softmax=cpu", "--place softmax=cpu cannot be read"),
        ("softmax=gpu:1,1", "--place lists a GPU twice for softmax"),
    ],
)
def test_places_that_cannot_be(place: str, message: str, tmp_path: Path, shoal: Shoal) -> None:
    places = [part for each in place.split() for part in ("--place", each)]
    with pytest.raises(ShoalError, match=message):
        shoal("compose", "softmax", "label", tmp_path / "r", *places)


@pytest.mark.parametrize("instances", [(Instances(1, (0,)),), (Instances(1), Instances(2))])
def test_a_model_is_placed_by_one_option(instances: tuple[Instances, ...]) -> None:
    with pytest.raises(InputError, match=r"softmax is placed by --place and by --instances.*--instances softmax=2"):
        place(SHIPPED["softmax"], replace(GPUS, tuning={"softmax": Tuning(instances, gpus=(1,))}))


@pytest.mark.usefixtures("has_cupy")
def test_one_model_of_a_pipeline_is_placed(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forest on the host and the encoder on GPU 1, or the reverse; pools and precision are for what is where."""
    monkeypatch.setattr("shoal.authoring.repository.precision.computes_bf16", lambda: True)
    for there, here in (("bert-large", "cuml"), ("cuml", "bert-large")):
        tuning = {there: Tuning(gpus=(1,)), here: Tuning(gpus=())}
        repository = compose("ensemble_all", tmp_path / there, artifacts=artifacts, tuning=tuning)
        configs = {name: read_config(repository / name) for name in ("bert-large", "cuml", "preprocess", "postprocess")}
        assert {name: gpus_of(config) for name, config in configs.items() if gpus_of(config)} == {there: (1,)}
        manifest = read_manifest(repository)
        assert manifest["launch"]["flags"][0].startswith("--cuda-memory-pool-byte-size=1:")
        is_on_gpu = there == "bert-large"
        assert manifest["precision"]["bert-large"]["dtype"] == ("fp32" if is_on_gpu else "bf16")


@pytest.mark.usefixtures("has_cupy")
def test_several_gpus_give_no_warning_of_their_own(artifacts: Path, tmp_path: Path) -> None:
    repository = compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=GPUS)
    found = {(finding.rule.id, finding.severity) for finding in check(repository)}
    assert ("gpu-may-hop", "advice") in found
    assert {severity for _, severity in found} == {"advice"}
    assert read_manifest(repository)["notes"] == [
        "Tensors between steps may be copied between GPUs; a repository for each GPU avoids that."
    ]


@pytest.mark.usefixtures("has_cupy")
def test_texts_that_only_the_host_reads_stay_there(artifacts: Path, bundle: Bundle, tmp_path: Path) -> None:
    """The encoder keeps upper case: compose leaves `preprocess` on the host, and check refuses it on a GPU."""
    project = tmp_path / "project"
    folder = project / "preprocess" / "mine"
    text = (SHIPPED["preprocess"].folder / "config.pbtxt").read_text(encoding="utf-8").replace('"preprocess"', '"mine"')
    write(folder / "config.pbtxt", text)
    code = (SHIPPED["preprocess"].folder / "1" / "model.py").read_text(encoding="utf-8")
    write(folder / "1" / "model.py", code)
    write(folder / "1" / "preprocess.json", replace(bundle, is_lowercase=False).dumps())
    write(folder / "1" / "vocab.txt", (artifacts / "vocab.txt").read_text(encoding="utf-8"))
    repository = compose(["mine", "softmax"], tmp_path / "r", projects=[project], plan=Plan(placement="gpu"))
    assert show_groups(read_config(repository / "mine").message) == "1 on the host"
    why = "texts that keep upper case are read on the host only"
    assert f"mine is on the host: {why}." in read_manifest(repository)["notes"]
    path = repository / "mine" / "config.pbtxt"
    path.write_text(path.read_text(encoding="utf-8").replace("KIND_CPU", "KIND_GPU"), encoding="utf-8")
    (finding,) = [finding for finding in check(repository) if finding.severity == "error"]
    assert finding.rule.id == "kind-unsupported"
    assert why in finding.what


# --- engines ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder / "config.json", json.dumps({"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}))
    write(folder / "model.safetensors", "\2\0\0\0\0\0\0\0{}")
    return folder


def engine(arguments: dict[str, Any]) -> ModelConfig:
    config = SHIPPED["llm-vllm"]
    message = type(config.message)()
    message.CopyFrom(config.message)
    message.parameters["engine_args"].string_value = json.dumps(arguments)
    return as_config(message, config.folder)


@pytest.mark.parametrize(
    ("number", "gpus", "tuning", "groups", "taken"),
    [
        (1, (0, 1), Tuning(), "1 on GPU 0", (0,)),
        (1, (3,), Tuning(), "1 on GPU 3", (3,)),
        (2, (0, 1), Tuning(), "1 on GPU 0", (0, 1)),
        (2, (2, 3), Tuning(), "1 on GPU 2", (2, 3)),
        (1, (0, 1), Tuning((Instances(1, (0, 1)),)), "1 on GPU 0 and 1", (0, 1)),
        (2, (0, 1), Tuning(gpus=(4,)), "1 on GPU 4", (4, 5)),
    ],
)
def test_an_engine_runs_once_on_as_many_gpus_as_it_needs(
    number: int, gpus: tuple[int, ...], tuning: Tuning, groups: str, taken: tuple[int, ...]
) -> None:
    config = engine({"tensor_parallel_size": number})
    message = place(config, Plan(placement="gpu", gpus=gpus, tuning={config.name: tuning}))
    assert show_groups(message) == groups
    assert gpus_of(as_config(message, config.folder)) == taken


@pytest.mark.parametrize("gpus", [(0,), (0, 2), (1, 0)])
def test_gpus_that_an_engine_cannot_take_together_are_refused(gpus: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"llm-vllm computes on 2 GPUs at once .* Say --gpu [01],[12]"):
        place(engine({"tensor_parallel_size": 2}), Plan(placement="gpu", gpus=gpus))


def test_a_pipeline_with_an_engine_on_two_gpus_is_composed_without_a_warning(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none of the models computes on a GPU \(prompt: its code .* --placement cpu"):
        compose("prompt", tmp_path / "r", weights=weights, plan=GPUS)
    swap = {"llm-hf": "llm-vllm"}
    repository = compose("llm", tmp_path / "r", weights=weights, plan=GPUS, swap=swap)
    placed = {
        name: show_groups(read_config(repository / name).message) for name in ("prompt", "llm-vllm", "completion")
    }
    assert placed == {"prompt": "1 on the host", "llm-vllm": "1 on GPU 0", "completion": "1 on the host"}
    assert {finding.severity for finding in check(repository)} <= {"advice"}
    assert "No model computes on GPU 1." in read_manifest(repository)["notes"]
    tuning = {"llm-vllm": Tuning((Instances(2, (1,)),))}
    with pytest.raises(ShoalError, match=r"2 instances of llm-vllm take the same GPUs, .*\[vllm-instances\]"):
        compose("llm", tmp_path / "r", weights=weights, plan=GPUS, swap=swap, tuning=tuning)


@pytest.mark.parametrize("placement", ["gpu", "hybrid"])
@pytest.mark.parametrize("ensemble", ["llm", "llm_bls"])
def test_an_engine_on_transformers_is_placed(ensemble: str, placement: str, weights: Path, tmp_path: Path) -> None:
    """On the GPU also with `hybrid`: only what surrounds it runs in the client."""
    repository = compose(ensemble, tmp_path / "r", weights=weights, plan=Plan(placement=placement, gpus=(2,)))
    groups = {path.name: show_groups(read_config(path).message) for path in repository.iterdir() if path.is_dir()}
    assert groups.pop("llm-hf") == "1 on GPU 2"
    assert {*groups.values()} <= {"1 on the host", "none"}
    assert {finding.severity for finding in check(repository)} <= {"advice"}
    two = compose(ensemble, tmp_path / "two", weights=weights, tuning={"llm-hf": Tuning((Instances(2),), gpus=(1,))})
    assert show_groups(read_config(two / "llm-hf").message) == "2 on GPU 1"


@pytest.mark.parametrize(("gpus", "groups"), [((0, 1), "devices that its backend chooses"), ((1,), "GPU 1")])
def test_the_vllm_backend_takes_the_plans_first_gpu(gpus: tuple[int, ...], groups: str) -> None:
    message = place(SHIPPED["vllm"], Plan(placement="gpu", target="26.01", gpus=gpus))
    assert show_groups(message) == f"1 on {groups}"


@pytest.mark.parametrize(
    ("device", "number", "said", "shown"),
    [
        (Device("gpu", 1, ENGINE_LIBRARY), 1, None, "1"),
        (Device("gpu", 2, ENGINE_LIBRARY), 2, None, "2,3"),
        (Device("gpu", 1, ENGINE_LIBRARY), 2, "GPU-a,5,GPU-c", "5,GPU-c"),
        (Device("gpu", 1, ENGINE_LIBRARY), 2, "0,1", SetupError),
        (Device("gpu", 0, ENGINE_LIBRARY), 1, "", SetupError),
        (Device(), 1, "0,1", ""),
        (Device("model", 0, ENGINE_LIBRARY), 2, "0,1", "0,1"),
        (Device("model", 0, ENGINE_LIBRARY), 2, None, None),
    ],
)
def test_vllm_sees_the_gpus_of_its_instance(
    device: Device, number: int, said: str | None, shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    if shown is SetupError:
        with pytest.raises(SetupError, match=f"vLLM is to compute on GPU .*, and CUDA_VISIBLE_DEVICES is '{said}'"):
            vllm._show_gpus(device, {"tensor_parallel_size": number})
        return
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said or "")
    if said is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    vllm._show_gpus(device, {"tensor_parallel_size": number})
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == shown


@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_vllm_for_another_kind_of_device_is_refused(is_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    made: Callable[..., Any] = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", made())
    platform = made(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, "vllm.platforms", made(current_platform=platform))
    right, wrong = Device(), Device("gpu", 0, ENGINE_LIBRARY)
    if not is_cpu:
        right, wrong = wrong, right
    for device in (right, Device("model", 0, ENGINE_LIBRARY)):
        assert ("kv_cache_memory_bytes" in vllm._complete({}, device)) == is_cpu
    with pytest.raises(SetupError, match=r"is placed on .*, and the vLLM in its environment does not compute there"):
        vllm._complete({}, wrong)
