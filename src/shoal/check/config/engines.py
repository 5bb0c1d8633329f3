"""Models on vLLM: engine arguments, in ``model.json`` or a parameter, and what NVIDIA's vLLM backend wants beside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.check.findings import Findings, Place, Rule, Severity
from shoal.check.models import MAX_CONFIG_BYTES, Model, Repository, entries, is_file
from shoal.errors import suggest
from shoal.repository.engine_args import FILE, OLD_FILE, Kind, check_arguments

UNKNOWN = Rule("engine-args-unknown", Severity.ERROR)
VALUE = Rule("engine-args-value", Severity.ERROR)
MISSING = Rule("engine-args-missing", Severity.ERROR)
TEXT = Rule("engine-args-text", Severity.WARNING)
OLD = Rule("engine-args-removed", Severity.WARNING)
RBLN = Rule("engine-args-rbln", Severity.ADVICE)
DECOUPLED = Rule("vllm-not-decoupled", Severity.ERROR)
TENSORS = Rule("vllm-tensors", Severity.ERROR)
INSTANCES = Rule("vllm-instances", Severity.ERROR)
RULES = (UNKNOWN, VALUE, MISSING, TEXT, OLD, RBLN, DECOUPLED, TENSORS, INSTANCES)

PARAMETER = "engine_args"  # of our own models on vLLM
_OWN = {"model": "model", "dtype": "dtype", "max_num_seqs": "slots", "max_model_len": "context"}  # parameters for these
_RULES = {Kind.UNKNOWN: UNKNOWN, Kind.OLD: OLD, Kind.RBLN: RBLN, Kind.TEXT: TEXT, Kind.VALUE: VALUE}
_WITHOUT_REQUEST_LOG = (25, 9)  # the first release of Triton with vLLM 0.10.1
_LORA = "multi_lora.json"
_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
# Tensors of the backend's releases from 23.10 to 26.01: src/model.py, auto_complete_config.
_INPUTS = (
    "text_input", "stream", "sampling_parameters", "exclude_input_in_output", "image", "return_finish_reason",
    "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens",
    "embedding_request",
)  # fmt: skip
_OUTPUTS = (
    "text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens",
)  # fmt: skip


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in models on vLLM."""
    if model.message is None:
        return
    folders = [model.folder / str(version) for version in model.served_versions]
    if model.message.backend == "vllm":
        yield from _decoupled(model, is_completed=not model.message.HasField("model_transaction_policy"))
        yield from _tensors(model)
        for folder in folders:
            yield from _folder(model, repository, folder)
    elif model.is_python:
        for path in filter(is_file, (folder / OLD_FILE for folder in (model.folder, *folders))):
            yield from _decoupled(model, is_completed=False)
            yield from _file(model, repository, path)
        if PARAMETER in model.parameters:
            yield from _parameter(model)


def _decoupled(model: Model, *, is_completed: bool) -> Findings:
    if not (is_completed or model.message.model_transaction_policy.decoupled):
        yield DECOUPLED.at(
            model.at("model_transaction_policy"),
            f"vLLM Triton backend must be configured to use decoupled model transaction policy; {model.name} is not.",
            "Write model_transaction_policy { decoupled: true }",
        )


def _tensors(model: Model) -> Findings:
    for field, tensors, known in (("input", model.inputs, _INPUTS), ("output", model.outputs, _OUTPUTS)):
        for index, tensor in enumerate(tensors):
            if tensor.name not in known and not tensor.is_optional:
                does = "reads, and each request must bring it" if field == "input" else "gives"
                yield TENSORS.at(
                    model.at(field, index, "name"),
                    f"{model.name} has the {field} {tensor.name}, which the vLLM backend never {does}.",
                    f"Remove it: the backend adds its own tensors. The text is {known[0]}.",
                )


def _folder(model: Model, repository: Repository, folder: Path) -> Findings:
    path = folder / FILE
    if is_file(path):
        yield from _file(model, repository, path)
        return
    others = [entry for entry in entries(folder) if entry.suffix == ".json" and entry.name != _LORA]
    yield MISSING.at(
        Place(folder),
        f"'{FILE}' containing vllm engine args must be provided in {model.name}/{folder.name}/.",
        f"Rename {others[0].name} to {FILE}." if len(others) == 1 else f'Write {FILE}: {{"model": "..."}}',
    )
    if len(others) == 1:
        yield from _file(model, repository, others[0])


def _file(model: Model, repository: Repository, path: Path) -> Findings:
    try:
        text = path.read_bytes()[:MAX_CONFIG_BYTES].decode("utf-8")
        arguments = json.loads(text)
    except (ValueError, RecursionError, OSError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 0
        yield VALUE.at(Place(path, line), f"It is not JSON: {error}.", "Write a JSON object of vLLM's arguments.")
        return
    if not isinstance(arguments, dict):
        yield VALUE.at(Place(path), "It is not a JSON object.", 'For example: {"model": "/weights/llama"}')
        return

    def at(name: str) -> Place:
        found = re.search(rf'"{re.escape(name)}"\s*:', text)
        return Place(path, text.count("\n", 0, found.start()) + 1 if found else 0)

    is_old = repository.target is not None and repository.target.release < _WITHOUT_REQUEST_LOG
    compiled = _read_object(_as_path(arguments.get("compiled_model_dir"), path) / "rbln_config.json").get("batch_size")
    for fault in check_arguments(arguments, compiled if isinstance(compiled, int) else None):
        is_read = fault.kind is Kind.TEXT and fault.name == "enable_lora" and arguments[fault.name].lower() == "true"
        if not (is_read or (is_old and fault.kind is Kind.OLD)):  # the backend takes this text for true
            yield _RULES[fault.kind].at(at(fault.name), fault.what, fault.fix)
    yield from _weights(model, arguments, at("model"))
    if str(arguments.get("enable_lora")).lower() == "true" and path.name == FILE and not is_file(path.parent / _LORA):
        what = f"Triton backend cannot find {_LORA}, which enable_lora needs beside {FILE}."
        yield MISSING.at(at("enable_lora"), what, f'Write {_LORA}: {{"name of the adapter": "/its/folder"}}')
    yield from _instances(model, arguments)


def _weights(model: Model, arguments: Mapping[str, Any], place: Place) -> Findings:
    weights = arguments.get("model")
    if weights is None or (weights == "" and not model.is_model_folder):
        what = "It names no model, and vLLM would serve its default, Qwen/Qwen3-0.6B."
        yield MISSING.at(place, what, 'Add "model": a folder, or OWNER/NAME of the Hugging Face hub.')
    folder = _as_path(weights, model.folder)
    beside = [path.name for path in entries(folder.parent) if path.is_dir()]
    if folder != model.folder and beside and folder.name not in beside:
        what = f"The folder {folder} does not exist: vLLM then asks the Hugging Face hub for it, which fails."
        yield VALUE.at(place, what, suggest(folder.name, beside[:20]))


def _parameter(model: Model) -> Findings:
    place = model.at_entry("parameters", key=PARAMETER, within=("value", "string_value"))
    try:
        arguments = json.loads(model.parameters[PARAMETER] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        what = f"The parameter {PARAMETER} of {model.name} is not a JSON object of vLLM's arguments."
        yield VALUE.at(place, what, "For example: string_value: '{\"gpu_memory_utilization\": 0.8}'")
        return
    for name in sorted(_OWN.keys() & arguments.keys()):
        what = f"{name} is set by the parameter {_OWN[name]} of {model.name}."
        yield VALUE.at(place, what, f"Remove it from {PARAMETER}.")
    texts = {name: model.parameters.get(_OWN[name], "") for name in ("max_num_seqs", "max_model_len")}
    own = {name: int(text) for name, text in texts.items() if text.isdecimal() and len(text) < 10}
    for fault in check_arguments({**own, **arguments}):
        rule = UNKNOWN if fault.kind in (Kind.OLD, Kind.RBLN) else _RULES[fault.kind]  # its environment has new vLLM
        yield rule.at(place, fault.what, fault.fix)
    yield from _instances(model, arguments)


def _instances(model: Model, arguments: Mapping[str, Any]) -> Findings:
    """Find instances that take the same GPUs: vLLM itself chooses as many as it computes on, from the first."""
    sizes = [arguments.get(f"{kind}_parallel_size") for kind in ("tensor", "pipeline")]
    is_parallel = any(isinstance(size, int) and size > 1 for size in sizes)
    number, first = 0, 0
    for index, group in enumerate(model.message.instance_group):
        if group.kind == group.KIND_GPU and is_parallel and model.message.backend == "vllm":
            yield INSTANCES.at(
                model.at("instance_group", index),
                f"KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in {model.name}: it computes"
                f" on several (tensor_parallel_size, pipeline_parallel_size: {sizes}).",
                "Write instance_group [ { count: 1 kind: KIND_MODEL } ]",
            )
        elif group.kind == group.KIND_MODEL or (group.kind == group.KIND_GPU and is_parallel):
            first = first if number else index
            number += max(1, group.count) * max(1, len(group.gpus))
    share = arguments.get("gpu_memory_utilization", _SHARE)
    if number > 1 and isinstance(share, int | float) and number * share > 1:
        yield INSTANCES.at(
            model.at("instance_group", first),
            f"{number} instances of {model.name} take the same GPUs, and {share:.0%} of their memory each.",
            f"Write count: 1, or gpu_memory_utilization of at most {int(100 / number) / 100}.",
        )


def _as_path(value: Any, default: Path) -> Path:
    return Path(value) if isinstance(value, str) and value.startswith("/") and "\0" not in value else default


def _read_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes()[:MAX_CONFIG_BYTES])
    except (ValueError, RecursionError, OSError):
        return {}
    return found if isinstance(found, dict) else {}
