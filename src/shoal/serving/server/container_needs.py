"""Devices that a repository's models need in a container, and folders that they name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.authoring.repository.config import ModelConfig
from shoal.errors import InputError
from shoal.system.files import read_json

ENGINES = ("gpt_model_path", "engine_dir")  # parameters of TensorRT-LLM's models: the folder of an engine
_ARGUMENTS = "model.json"  # of vLLM's backend, beside the version folder's content
_FOLDERS = ("model", "tokenizer", "compiled_model_dir", "download_dir")  # arguments of vLLM that may be folders
_ON_GPUS = frozenset({"tensorrt", "tensorrtllm", "vllm"})  # backends that need a GPU, whatever the instance groups
_GPU_MODULES = frozenset({"tensorrt_llm", "vllm"})
_GPU, _MODEL = 1, 3  # instance kinds KIND_GPU and KIND_MODEL; a model of the latter chooses its devices itself


def find_devices(configs: Iterable[ModelConfig]) -> list[str]:
    """Return the options of ``docker run`` that give the models their devices: GPUs, or Rebellions' NPUs.

    The guide of Rebellions gives the container all devices (docs.rbln.ai, tutorials for Triton Inference Server).
    """
    found = set[str]()
    for config in configs:
        if any(arguments.get("device") == "rbln" for _, arguments in _read_arguments(config)):
            found.add("--privileged")
        elif (
            {group.kind for group in config.message.instance_group} & {_GPU, _MODEL}
            or config.backend in _ON_GPUS
            or _GPU_MODULES & {*config.requires}
        ):
            found.add("--gpus all")  # a subset would be renumbered inside
    return sorted(found)


def find_named_folders(config: ModelConfig) -> list[str]:
    """Return the folders of this machine that a model's parameters, or its arguments for vLLM, name.

    Raises:
        InputError: such a path is relative: it begins at the folder where the server starts.
    """
    values = {name: (value, config.folder) for name, value in config.spec.parameters.items()}
    for folder, arguments in _read_arguments(config):
        values |= {name: (value, folder) for name in _FOLDERS if isinstance(value := arguments.get(name), str)}
    for name, (value, folder) in values.items():
        if _is_relative(name, value, folder):
            versions = config.folder.glob("[0-9]*")
            inside = next((path for path in versions if path.parts[-2:] == Path(value).parts[-2:]), None)
            right = f"/models/{'/'.join(inside.parts[-2:])}" if inside else "an absolute path"
            what = f"{name} of {config.name} is {value}: a relative path, which leads nowhere in the container."
            raise InputError(what, f"Write {right}.")
    return [value for value, _ in values.values() if value.startswith("/") and Path(value).is_dir()]


def _is_relative(name: str, value: str, folder: Path) -> bool:
    """Whether a value is a relative path: of an engine, or a folder that is there; others may be names on the hub."""
    if not value or value.startswith(("/", "${", "$$")):
        return False
    is_folder = value.startswith(("./", "../")) or (
        "/" in value and any((at / value).is_dir() for at in (Path(), folder))
    )
    return name in ENGINES or (is_folder and (name in _FOLDERS or name.endswith("_dir")))


def _read_arguments(config: ModelConfig) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the version folders of a model of vLLM's backend, and the arguments there; none that cannot be read."""
    for path in config.folder.glob(f"[0-9]*/{_ARGUMENTS}") if config.backend == "vllm" else ():
        try:
            arguments = read_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(arguments, dict):
            yield path.parent, arguments
