"""The command for NVIDIA's container: its image, what it installs, devices, memory, ports and mounts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.authoring.composition.compose import compose
from shoal.authoring.environment.targets import LATEST
from shoal.authoring.repository.plan import Plan, Tuning
from shoal.cli import app
from shoal.errors import InputError
from shoal.serving.server.container import container_command
from tests.support.containers import KIND, engine, find_installed, native, write
from tests.support.planted import MODEL, config


def printed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, arguments), "--print"], env={"COLUMNS": "300"})


def test_a_composed_repository(
    repository: Path, artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compose("ensemble_all", tmp_path / "made", artifacts=artifacts, plan=Plan(target="26.06"))
    command = container_command(made)
    assert command.startswith("docker run --rm \\\n  --shm-size=1024m \\\n  --ulimit memlock=-1 \\\n  --ulimit stack=")
    assert f"-v {made}:/models:ro \\\n  nvcr.io/nvidia/tritonserver:26.06-py3 \\\n  bash -c '" in command
    assert find_installed(command) == ["array-api-compat>=1.11", "tokenizers>=0.21"]
    assert "exec tritonserver --model-repository=/models --disable-auto-complete-config --model-contr" in command
    assert "--gpus" not in command
    with pytest.raises(
        InputError, match=r"was composed for embedded, not for a container\. Type: shoal compose"
    ) as refused:
        container_command(repository)
    fix = f"Type: shoal compose ensemble_all {repository}-{LATEST} --artifacts DIR --target {LATEST}"
    assert refused.value.fix == fix
    with pytest.raises(InputError, match=r"-26\.06 --artifacts DIR --target 26\.06$"):
        container_command(repository, target="26.06")
    with pytest.raises(InputError, match=r"was composed for 26\.06, not for 25\.01\. Type: .* .*/made-25\.01 --artif"):
        container_command(made, target="25.01")
    monkeypatch.chdir(made)
    with pytest.raises(InputError, match=rf"ensemble_all {made}-25\.01 --artifacts DIR --target 25\.01$"):
        container_command(Path(), target="25.01")
    with pytest.raises(InputError, match="is not a model repository"):
        container_command(tmp_path / "made" / "cuml" / "1")


@pytest.mark.parametrize(("target", "cuda"), [("25.01", 12), ("25.07", 12), ("25.08", 13), ("26.11", 13)])
def test_gpu_packages_fit_the_cuda_of_the_release(target: str, cuda: int, artifacts: Path, tmp_path: Path) -> None:
    plan = Plan(placement="gpu", target=target)
    command = container_command(compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=plan))
    assert find_installed(command) == [
        "array-api-compat>=1.11", f"cupy-cuda{cuda}x>=14.1", f"pylibcudf-cu{cuda}==26.10.*", f"rmm-cu{cuda}==26.10.*",
        "tokenizers>=0.21",
    ]  # fmt: skip
    assert "--gpus all" in command


def test_native_models_need_no_packages(artifacts: Path, tmp_path: Path) -> None:
    made = compose("cuml", tmp_path / "r", artifacts=artifacts, plan=Plan(placement="gpu", target="26.06"))
    command = container_command(made)
    assert "pip" not in command
    assert "--gpus all" in command


def test_repositories_made_by_hand(tmp_path: Path) -> None:
    repository = write(tmp_path / "a repository", "m", config("m"), f"import yaml\n{MODEL}")
    write(repository, "n", 'platform: "onnxruntime_onnx"')
    command = container_command(repository)
    assert "tritonserver:26.11-py3 " in command
    assert "--disable-auto-complete-config" not in command, "its configurations may be incomplete"
    assert find_installed(command) == ["PyYAML"]  # in the version that pip chooses for the image's Python
    assert f"-v '{repository}:/models:ro'" in command
    assert "--gpus" not in command
    assert "tritonserver:23.08-py3 " in container_command(repository, target="23.08")


def test_modules_that_are_imported_later(tmp_path: Path) -> None:
    """In functions too, but not those that the code does without; and RAPIDS, of one release."""
    code = (
        "import cudf\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n"
        "try:\n    import orjson\nexcept ImportError:\n    orjson = None\n"
        "try:\n    import pluggy\nexcept KeyError:\n    pass\n"
        f"def initialize():\n    import yaml\n{MODEL}"
    )
    write(tmp_path, "m", config("m"), code)
    assert find_installed(container_command(tmp_path, target="25.07")) == ["PyYAML", "cudf-cu12==26.10.*", "pluggy"]


def test_a_module_that_no_package_here_has(tmp_path: Path) -> None:
    write(tmp_path, "m", config("m"), f"import no_such_module\n{MODEL}")
    with pytest.raises(InputError, match="The package of the module no_such_module is not known: it is not installed"):
        container_command(tmp_path)


def test_a_model_without_its_copy_of_shoal(tmp_path: Path) -> None:
    write(tmp_path, "m", config("m"), "from shoal import Component\n")
    with pytest.raises(InputError, match="Model m imports shoal, of which it has no copy"):
        container_command(tmp_path)


@pytest.mark.parametrize(
    ("backend", "target", "image"),
    [
        ("vllm", "26.06", "vllm-python-py3"),
        ("tensorrtllm", "25.12", "trtllm-python-py3"),
        ("tensorflow", "24.10", "py3"),
        ("one_of_my_own", "24.10", "py3"),
        ("tensorflow", "25.03", ""),
        ("tensorrtllm", "26.10", ""),
        ("vllm", "23.08", ""),
        ("fastertransformer", "23.08", ""),
    ],
)
def test_the_image_has_the_backends(backend: str, target: str, image: str, tmp_path: Path) -> None:
    write(tmp_path, "m", native(backend))
    if image:
        assert f"tritonserver:{target}-{image} " in container_command(tmp_path, target=target)
        return
    with pytest.raises(InputError, match=f"Model m needs the backend {backend}: no image of Triton {target} has it"):
        container_command(tmp_path, target=target)


def test_two_backends_that_no_image_has_together(tmp_path: Path) -> None:
    write(write(tmp_path, "a", native("vllm")), "b", native("onnxruntime"))
    with pytest.raises(InputError, match=r"no image of Triton 26\.06 has all of onnxruntime, vllm\. Divide"):
        container_command(tmp_path, target="26.06")


@pytest.mark.parametrize(
    ("group", "has_gpus"), [("KIND_CPU", False), ("KIND_GPU", True), ("KIND_MODEL", True), ("KIND_AUTO", False)]
)
def test_gpus_are_given_to_models_that_name_them(group: str, has_gpus: bool, tmp_path: Path) -> None:
    write(tmp_path, "m", native("onnxruntime", KIND.format(group)))
    assert ("--gpus all" in container_command(tmp_path)) == has_gpus


def test_an_engine_of_several_ranks(tmp_path: Path) -> None:
    repository = write(tmp_path / "r", "tensorrt_llm", engine(tmp_path / "engine", 2))
    command = container_command(repository, target="25.12")
    assert (
        "exec mpirun --allow-run-as-root -n 1 tritonserver --model-repository=/models --backend-config=python,shm"
        in command
    )
    assert (
        ": -n 1 tritonserver --model-repository=/models --backend-config=python,shm-region-prefix-name=prefix1_"
        " --model-control-mode=explicit --load-model=tensorrt_llm'" in command
    )
    assert f"--mount type=bind,src={tmp_path}/engine,dst={tmp_path}/engine,readonly" in command
    assert "--gpus all" in command
    one = write(tmp_path / "s", "tensorrt_llm", engine(tmp_path / "small", 1))
    assert "mpirun" not in container_command(one, target="25.12")


def test_nvidias_code_around_an_engine_finds_its_packages_in_the_image(tmp_path: Path) -> None:
    """Pillow in the version that TensorRT-LLM wants."""
    repository = write(tmp_path / "r", "tensorrt_llm", engine(tmp_path / "engine", 1))
    write(repository, "preprocessing", config("preprocessing"), f"import transformers\nfrom PIL import Image\n{MODEL}")
    assert find_installed(container_command(repository, target="25.12")) == []
    assert find_installed(container_command(write(tmp_path, "m", config("m"), f"import PIL\n{MODEL}"))) == [
        "pillow>=11"
    ]


def test_ranks_of_an_engine_in_a_repository_with_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = engine(tmp_path / "engine", 2).replace(str(tmp_path / "engine"), "/models/tensorrt_llm/1")
    write(tmp_path / "r", "tensorrt_llm", inside)
    shutil.copy(tmp_path / "engine" / "config.json", tmp_path / "r" / "tensorrt_llm" / "1")
    assert "exec mpirun " in container_command(Path("r"), target="25.12")


@pytest.mark.parametrize(("version", "right"), [(1, "/models/tensorrt_llm/1"), (2, "an absolute path")])
def test_a_relative_path_of_an_engine(version: int, right: str, tmp_path: Path) -> None:
    """As in NVIDIA's own commands: it begins at the folder where the server starts."""
    path = f"triton_model_repo/tensorrt_llm/{version}"
    more = f'parameters {{ key: "gpt_model_path" value {{ string_value: "{path}" }} }}'
    write(tmp_path, "tensorrt_llm", native("tensorrtllm", more))
    with pytest.raises(InputError, match=rf"is {path}: a relative path, .* Write {right}\."):
        container_command(tmp_path, target="25.12")


def test_mistakes_are_printed_first(tmp_path: Path) -> None:
    write(tmp_path, "m", config("m").replace("dims: [ 4 ]", "dims: [ 0 ]"), MODEL)
    said = printed(tmp_path)
    assert "(tensor-dims)" in said.stdout
    assert "docker" not in said.stdout
    assert "was not printed. Correct them, or print it as it is: shoal serve" in str(said.exception)
    assert "docker" in printed(tmp_path, "--no-check").stdout


def test_options_of_serve_are_obeyed_or_named(tmp_path: Path) -> None:
    write(tmp_path, "m", config("m"), MODEL)
    given = "--bare --http-port 9000 --grpc-port 0 --model-memory-mib 500 --max-wait 3"
    said = printed(tmp_path, *given.split())
    assert "-p 127.0.0.1:9000:8000" in said.stdout
    assert "-p 127.0.0.1::8001" in said.stdout
    assert "-p 127.0.0.1:8002:8002" in said.stdout
    assert "--memory=1000m" in said.stdout  # Triton's own, and one process of m
    assert "Left out, since --bare has no proxy of shoal's: --max-wait" in said.stderr
    assert said.stdout == container_command(tmp_path, ports=(9000, 0, 8002), model_memory_mib=500) + "\n"
    said = printed(tmp_path, "--host", "::", "--open", "--bare")
    assert "-p [::]:8000:8000" in said.stdout
    assert said.stderr == ""
    assert "without a key" in str(printed(tmp_path, "--host", "0.0.0.0").exception)


def test_releases_that_are_not_known(tmp_path: Path) -> None:
    write(tmp_path, "m", config("m"), MODEL)
    said = printed(tmp_path, "--target", "99.12")
    assert "tritonserver:99.12-py3" in said.stdout
    assert "warning: Release 99.12 is not known: it is taken to be like 26.11, the newest that is." in said.stderr
    assert "tritonserver:22.11-py3" in (said := printed(tmp_path, "--target", "22.11", "--bare")).stdout
    assert said.stderr == ""
    for name in ("22.10", "26.13", "next"):
        assert f"Unknown target '{name}'. Known: embedded, or a release from 22.11 on" in str(
            printed(tmp_path, "--target", name).exception
        )
    for option in (["--target", "26.06"], ["--bare"]):
        alone = CliRunner().invoke(app, ["serve", str(tmp_path), *option])
        assert f"{option[0]} is for --print alone" in str(alone.exception)


def test_packages_for_an_older_python(tmp_path: Path) -> None:
    """Versions within shoal's bounds do not exist for it."""
    write(tmp_path, "m", config("m"), f"import transformers\nimport vllm\nimport cudf\n{MODEL}")
    assert find_installed(container_command(tmp_path, target="23.08")) == ["cudf-cu12", "transformers", "vllm"]
    (tmp_path / "m" / "1" / "model.py").write_text(f"import transformers\n{MODEL}", encoding="utf-8")
    assert find_installed(container_command(tmp_path, target="24.11"))[0].startswith("transformers>=")


@pytest.mark.parametrize("placed", [{"placement": "hybrid"}, {"tuning": {"cuml": Tuning(gpus=(0,))}}])
def test_components_on_the_host_beside_a_gpu(placed: dict[str, Any], artifacts: Path, tmp_path: Path) -> None:
    plan = Plan(target="26.06", **placed)
    command = container_command(compose("ensemble_all", tmp_path / "r", artifacts=artifacts, plan=plan))
    assert find_installed(command) == ["array-api-compat>=1.11", "tokenizers>=0.21"]
    assert "--gpus all" in command


def test_what_takes_tensors_from_a_gpu(tmp_path: Path) -> None:
    """CuPy, unless there is torch, which does it too."""
    made = compose("softmax", tmp_path / "r", plan=Plan(target="26.06"))
    assert find_installed(container_command(made)) == ["array-api-compat>=1.11"]
    write(made, "other", native("onnxruntime", KIND.format("KIND_GPU")))
    assert find_installed(container_command(made)) == ["array-api-compat>=1.11", "cupy-cuda13x>=14.1"]
    write(made, "third", config("third"), f"import torch\n{MODEL}")
    assert find_installed(container_command(made)) == ["array-api-compat>=1.11", "torch>=2.10"]


def write_arguments(repository: Path, **arguments: str) -> Path:
    """Write a model on vLLM's backend, with its model.json."""
    write(repository, "vllm_model", native("vllm", "instance_group [ { kind: KIND_MODEL } ]"))
    (repository / "vllm_model" / "1" / "model.json").write_text(json.dumps(arguments), encoding="utf-8")
    return repository


def test_folders_and_devices_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, compiled = tmp_path / "weights", tmp_path / "rbln-llama"
    weights.mkdir()
    compiled.mkdir()
    command = container_command(write_arguments(tmp_path / "hub", model="org/name"), target="26.06")
    assert "--gpus all" in command
    assert "--mount" not in command
    given = {"model": str(weights), "tokenizer": str(weights), "compiled_model_dir": str(compiled), "device": "rbln"}
    command = container_command(write_arguments(tmp_path / "npu", **given), target="26.06")
    assert "--privileged" in command
    assert "--gpus" not in command
    for folder in (weights, compiled):
        assert f"--mount type=bind,src={folder},dst={folder},readonly" in command
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for number, relative in enumerate(("./weights", "org/name")):
        made = write_arguments(tmp_path / f"relative{number}", model=relative)
        with pytest.raises(InputError, match=rf"model of vllm_model is {relative}: a relative path.*an absolute path"):
            container_command(made, target="26.06")
