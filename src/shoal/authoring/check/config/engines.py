"""Rules for models on vLLM: engine arguments, and the configuration that NVIDIA's vLLM backend needs.

The backend calls ``AsyncEngineArgs(**json)`` with the object in ``model.json``. ``AsyncEngineArgs`` is a plain
dataclass: an unknown name raises TypeError, and a value of a wrong type is kept as it is. shoal's own models on vLLM,
which do not use that backend, have such an object in the parameter ``engine_args``. Names are read from the
source of the vLLM in the model's environment (vllm/engine/arg_utils.py), which is not imported. Without it, only usual
names of vLLM 0.32 are known, and a near miss of one is a warning. Conditions between arguments are from vllm/config.
"""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

from shoal.authoring.check.environments import PARAMETER as ENVIRONMENT
from shoal.authoring.check.environments import VARIABLE
from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, entries, is_file
from shoal.authoring.repository.devices import PARALLEL_SIZES, count_parallel
from shoal.system.files import parse_json, read_bytes, read_json, read_text

UNKNOWN = Rule("engine-args-unknown", Severity.ERROR)
MISSPELT = Rule("engine-args-misspelt", Severity.WARNING)
VALUE = Rule("engine-args-value", Severity.ERROR)
MISSING = Rule("engine-args-missing", Severity.ERROR)
TEXT = Rule("engine-args-text", Severity.WARNING)
OLD = Rule("engine-args-removed", Severity.WARNING)
RBLN = Rule("engine-args-rbln", Severity.ADVICE)
DECOUPLED = Rule("vllm-not-decoupled", Severity.ERROR)
TENSORS = Rule("vllm-tensors", Severity.ERROR)
INSTANCES = Rule("vllm-instances", Severity.ERROR)

VERSION = "0.32"  # of which the arguments below are
_FILE = "vllm/engine/arg_utils.py"
_CLOSE = 0.85  # least difflib ratio of a misspelt name and the right one
FILE = "model.json"  # in the version folder: vllm_backend, src/model.py
OLD_FILE = "vllm_engine_args.json"  # of the tutorials of 2023, whose model.py is a plain Python model
PARAMETER = "engine_args"  # of our own models on vLLM
_OWN = {"max_num_seqs": "slots", "max_model_len": "context"}  # arguments that parameters of our own models set
_WITHOUT_REQUEST_LOG = (25, 9)  # the first release of Triton with vLLM 0.10.1
_LORA = "multi_lora.json"
_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
_COMPILED = "compiled_model_dir"  # of vllm-rbln before 0.8.1, with device "rbln"
# Tensors of the backend's releases from 23.10 to 26.01: src/model.py, auto_complete_config.
_INPUTS = """text_input stream sampling_parameters exclude_input_in_output image return_finish_reason
    return_cumulative_logprob return_logprobs return_num_input_tokens return_num_output_tokens
    embedding_request""".split()
_OUTPUTS = "text_output finish_reason cumulative_logprob logprobs num_input_tokens num_output_tokens".split()


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in a model that runs on vLLM."""
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
        if PARAMETER in model.parameters and any("shoal" in text for _, text in model.sources):
            yield from _parameter(model, repository)


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
        text = read_bytes(path).decode("utf-8")
        arguments = parse_json(text)
    except (ValueError, OSError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 0
        yield VALUE.at(Place(path, line), f"It is not JSON: {error}.", "Write a JSON object of vLLM's arguments.")
        return
    if not isinstance(arguments, dict):
        yield VALUE.at(Place(path), "It is not a JSON object.", 'For example: {"model": "/weights/llama"}')
        return

    def at(name: str) -> Place:
        found = re.search(rf'"{re.escape(name)}"\s*:', text)
        return Place(path, text.count("\n", 0, found.start()) + 1 if found else 0)

    has_old = None if repository.target is None else repository.target.release < _WITHOUT_REQUEST_LOG
    yield from check_arguments(arguments, at, _read_names(model, repository), has_old=has_old)
    weights = arguments.get("model")
    if weights is None or (weights == "" and not model.is_model_folder):
        what = "It names no model, and vLLM would serve its default, Qwen/Qwen3-0.6B."
        yield MISSING.at(at("model"), what, 'Add "model": a folder, or OWNER/NAME of the Hugging Face hub.')
    if str(arguments.get("enable_lora")).lower() == "true" and path.name == FILE and not is_file(path.parent / _LORA):
        what = f"Triton backend cannot find {_LORA}, which enable_lora needs beside {FILE}."
        yield MISSING.at(at("enable_lora"), what, f'Write {_LORA}: {{"name of the adapter": "/its/folder"}}')
    yield from _instances(model, arguments)


def _parameter(model: Model, repository: Repository) -> Findings:
    place = model.at_entry("parameters", key=PARAMETER, within=("value", "string_value"))
    try:
        arguments = parse_json(model.parameters[PARAMETER] or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return  # the component refuses it
    texts = {name: model.parameters.get(own, "") for name, own in _OWN.items()}
    own = {name: int(text) for name, text in texts.items() if text.isdecimal() and len(text) < 10}
    yield from check_arguments({**own, **arguments}, lambda _: place, _read_names(model, repository), has_old=False)
    yield from _instances(model, arguments)


def _instances(model: Model, arguments: Mapping[str, Any]) -> Findings:
    """Find instances that would share GPUs, or that take several with a kind that has one.

    With KIND_MODEL, vLLM takes GPUs from the first on. With KIND_GPU, an instance has its own GPU, and in shoal's own
    models the following ones, too, if it computes on several.
    """
    width = count_parallel(arguments)
    users, first = Counter[int](), 0
    for index, group in enumerate(model.message.instance_group):
        if group.kind == group.KIND_GPU and width > 1 and model.message.backend == "vllm":
            yield INSTANCES.at(
                model.at("instance_group", index),
                f"KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in {model.name}: it computes"
                f" on {width} ({', '.join(PARALLEL_SIZES)}: {[arguments.get(name) for name in PARALLEL_SIZES]}).",
                "Write instance_group [ { count: 1 kind: KIND_MODEL } ]",
            )
        elif group.kind in (group.KIND_MODEL, group.KIND_GPU):
            first = first if users else index
            gpus = [gpu + more for gpu in group.gpus or (0,) for more in range(width)]
            users.update({gpu: max(1, group.count) * gpus.count(gpu) for gpu in set(gpus)})
    number = max(users.values(), default=0)
    share = arguments.get("gpu_memory_utilization", _SHARE)
    if number > 1 and isinstance(share, int | float) and number * share > 1:
        yield INSTANCES.at(
            model.at("instance_group", first),
            f"{number} instances of {model.name} take the same GPUs, and {share:.0%} of their memory each.",
            f"Write count: 1, or gpu_memory_utilization of at most {int(100 / number) / 100}.",
        )


# --- engine arguments --------------------------------------------------------------------------------------------


def check_arguments(
    arguments: Mapping[str, Any],
    at: Callable[[str], Place],
    known: Collection[str] = (),
    *,
    has_old: bool | None = None,
) -> Findings:
    """Find the mistakes in vLLM's engine arguments, JSON values by name; ``at`` returns the place of an argument.

    ``known`` are the names of all arguments of the server's vLLM; if it is empty, only usual names are known.
    ``has_old``: whether the server's vLLM is older than 0.10.1; None if unknown. ``device`` "rbln" means RBLN's vLLM
    (vllm-rbln); RBLN's conditions between arguments are then checked, too.
    """
    is_rbln = arguments.get("device") == "rbln"
    if is_rbln:
        what = f"Only RBLN's vLLM (vllm-rbln) takes device rbln and {_COMPILED}; any other vLLM refuses to start."
        yield RBLN.at(at("device"), what, "For a GPU or a CPU, remove them.")
        yield from _rbln(arguments, at)
    for name, value in arguments.items():
        if name in (known or _KINDS):
            yield from _check_value(name, value, at(name)) if name in _KINDS and value is not None else ()
        elif not (is_rbln and name in ("device", _COMPILED)):
            yield from _refuse(name, at(name), known, has_old=has_old)
    yield from _relations(arguments, at)


def _refuse(name: str, place: Place, known: Collection[str], *, has_old: bool | None) -> Findings:
    cutoff = 0.75 if known else _CLOSE  # a name that is surely wrong may be further from the right one
    near = next(iter(get_close_matches(name.strip("-").replace("-", "_").lower(), known or _KINDS, 1, cutoff)), "")
    fix = f"Did you mean {near}?" if near else "Remove it."
    if known:
        yield UNKNOWN.at(place, f"The vLLM of this model has no argument '{name}', and refuses to start.", fix)
    elif name == _COMPILED:
        what = f"{name} is an argument of RBLN's vLLM (vllm-rbln), with device rbln; any other vLLM refuses it."
        yield UNKNOWN.at(place, what, 'Add "device": "rbln", or remove it.')
    elif name in _OLD.split():
        fix = "Remove it, or serve with the older vLLM."
        if name == "disable_log_requests":
            fix = "Remove it: vLLM no longer logs requests, unless enable_log_requests is true."
        if not has_old:
            is_gone = has_old is False and name == "disable_log_requests"  # of the others, some went later
            rule = UNKNOWN if is_gone else OLD
            yield rule.at(place, f"{name} is an argument of older vLLM; vLLM {VERSION} refuses it.", fix)
    elif near:
        yield MISSPELT.at(place, f"vLLM {VERSION} has the argument {near}; '{name}' is not known here.", fix)


def _check_value(name: str, value: Any, place: Place) -> Findings:
    kinds = _KINDS[name]
    expected = " or ".join(_EXPECTED[kind] for kind in kinds)
    shown = json.dumps(value)[:80]
    if not any(_is(value, kind) for kind in kinds):
        meant = _read(value, kinds[0])
        if meant is None:
            yield VALUE.at(place, f"{name} is {shown}, not {expected}.", f"Write {expected}, or remove {name}.")
        elif not (name == "enable_lora" and meant):  # the backend takes this text for true
            counts = "any text but the empty one counts as true" if kinds[0] == "bool" else "vLLM does not convert it"
            what = f"{name} is the text {shown}, not {expected}: {counts}."
            yield TEXT.at(place, what, f'Write "{name}": {json.dumps(meant)}')
    elif name == "gpu_memory_utilization" and not 0 < value <= 1:
        what = f"{name} is {shown}, and must be above 0 and at most 1: the share of the GPU's memory."
        yield VALUE.at(place, what, f'For example: "{name}": 0.9')


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "bool"
    types: dict[str, type | tuple[type, ...]] = {"float": (int, float), "int": int, "str": str, "dict": dict}
    return kind != "bool" and isinstance(value, types.get(kind, list)) and not (kind == "float" and value != value)


def _read(value: Any, kind: str) -> bool | float | None:
    """Parse a text such as ``"true"`` that should have been a JSON value of type ``kind``; None if that fails."""
    if not isinstance(value, str):
        return None
    if kind == "bool":
        return {"true": True, "false": False}.get(value.strip().lower())
    try:
        read = {"int": int, "float": float}[kind](value)
    except (KeyError, ValueError):
        return None
    return read if math.isfinite(read) else None


def _relations(arguments: Mapping[str, Any], at: Callable[[str], Place]) -> Findings:
    """Check vLLM's own conditions between arguments (vllm/config/scheduler.py, verify_max_model_len)."""
    least = [("max_num_batched_tokens", "max_num_seqs"), ("max_num_seqs", "max_num_active_seqs")]
    if arguments.get("enable_chunked_prefill") is False:
        least.append(("max_num_batched_tokens", "max_model_len"))
    for large, small in least:
        more, less = _whole(arguments, large), _whole(arguments, small)
        if more and less and 0 < more < less:
            where = " without chunked prefill" if small == "max_model_len" else ""
            what = f"{large} ({more}) must be at least {small} ({less}){where}."
            yield VALUE.at(at(large), what, f"Increase {large}, or decrease {small}.")


def _rbln(arguments: Mapping[str, Any], at: Callable[[str], Place]) -> Findings:
    """Check RBLN's conditions between arguments (docs.rbln.ai: tutorials for Triton, guide to block_size)."""
    names = ("max_model_len", "max_num_batched_tokens", "block_size", "max_num_seqs")
    longest, tokens, block, seqs = (_whole(arguments, name) for name in names)
    compiled = _read_compiled_batch(arguments)
    if longest and tokens and tokens != longest:
        what = f"max_num_batched_tokens ({tokens}) must equal max_model_len ({longest}) on device rbln."
        yield VALUE.at(at("max_num_batched_tokens"), what, "Write the length that the model was compiled for.")
    if longest and block and longest % block:
        what = f"block_size ({block}) must equal max_model_len ({longest}), or divide it, on device rbln."
        yield VALUE.at(at("block_size"), what, f'Write "block_size": {longest}')
    if compiled and seqs and seqs != compiled:
        what = f"max_num_seqs is {seqs}, and the model was compiled for batches of {compiled}."
        yield VALUE.at(at("max_num_seqs"), what, f'Write "max_num_seqs": {compiled}')
    model, folder = (PurePath(str(arguments.get(key, ""))).name for key in ("model", _COMPILED))
    if model.startswith("rbln-") and folder.startswith("rbln-") and model != folder:
        what = f"model is {model} and compiled_model_dir is {folder}: two compiled models."
        yield VALUE.at(at(_COMPILED), what, "Name the same folder in both.")


def _read_compiled_batch(arguments: Mapping[str, Any]) -> int | None:
    """Return the batch size that RBLN's compiler compiled a model for; None if the compiled model cannot be read."""
    try:
        return _whole(read_json(Path(arguments[_COMPILED], "rbln_config.json")), "batch_size")
    except (KeyError, TypeError, AttributeError, ValueError, OSError):
        return None


def _whole(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# --- vLLM's arguments, by type -----------------------------------------------------------------------------------

_TYPES = {  # the arguments that users write, and those that resemble them
    "bool": """disable_custom_all_reduce disable_log_stats enable_chunked_prefill enable_expert_parallel
        enable_log_requests enable_lora enable_prefix_caching enforce_eager skip_tokenizer_init trust_remote_code""",
    "int": """block_size data_parallel_size data_parallel_size_local kv_cache_memory_bytes max_cpu_loras max_logprobs
        max_lora_rank max_loras max_model_len max_num_active_seqs max_num_batched_tokens max_num_seqs
        pipeline_parallel_size seed tensor_parallel_size""",
    "float": "cpu_offload_gb gpu_memory_utilization",
    "str": """distributed_executor_backend download_dir dtype kv_cache_dtype load_format model quantization revision
        tokenizer tokenizer_mode tokenizer_revision""",
    "dict": "compilation_config hf_overrides limit_mm_per_prompt speculative_config",
    "str list": "served_model_name",
    "bool str": "hf_token",
}
_KINDS: Mapping[str, tuple[str, ...]] = {n: (*kinds.split(),) for kinds, names in _TYPES.items() for n in names.split()}
# Arguments of the tutorials that only vLLM 0.2 to 0.9 has; pull request 21739 removed disable_log_requests in 0.10.1.
_OLD = """device disable_log_requests enable_prompt_adapter engine_use_ray guided_decoding_backend
    max_context_len_to_capture max_log_len max_paddings max_seq_len_to_capture num_scheduler_steps
    num_speculative_tokens rope_scaling speculative_model swap_space task use_v2_block_manager worker_use_ray"""
_EXPECTED = {"bool": "true or false", "int": "a whole number", "float": "a number"}
_EXPECTED |= {"str": "a text", "dict": "an object", "list": "a list"}


def _read_names(model: Model, repository: Repository) -> frozenset[str]:
    """Return the names of all arguments of the vLLM in the model's environment, a folder; empty if it is not here.

    Without an environment of its own, the model runs in this Python, unless it is checked for another server.
    """
    value, is_here = model.parameters.get(ENVIRONMENT, ""), not repository.target or repository.target.is_embedded
    own = sys.path if model.is_python and is_here else []
    folder = Path(value.replace(VARIABLE, str(model.folder)))
    places = [*folder.glob("lib/python3.*/site-packages")] if value else [*map(Path, own)]
    try:
        tree = ast.parse(next((read_text(place / _FILE) for place in places if is_file(place / _FILE)), ""))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return frozenset()
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    return frozenset(ast.unparse(n.target) for each in classes for n in each.body if isinstance(n, ast.AnnAssign))
