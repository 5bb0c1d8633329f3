"""Rules for models on vLLM: engine arguments, and the configuration that NVIDIA's vLLM backend needs.

The backend calls ``AsyncEngineArgs(**json)`` with the object in ``model.json``. ``AsyncEngineArgs`` is a plain
dataclass: an unknown name raises TypeError, and a value of a wrong type is kept as it is. shoal's own models on vLLM,
which do not use that backend, have such an object in the parameter ``engine_args``. This module does not import vLLM:
names and types are copied from vLLM 0.32 (vllm/engine/arg_utils.py), conditions between arguments from vllm/config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from shoal.check.findings import Finding, Findings, Place, Rule, Severity
from shoal.check.models import Model, Repository, entries, is_file
from shoal.errors import suggest
from shoal.files import parse_json, read_bytes, read_json

UNKNOWN = Rule("engine-args-unknown", Severity.ERROR)
VALUE = Rule("engine-args-value", Severity.ERROR)
MISSING = Rule("engine-args-missing", Severity.ERROR)
TEXT = Rule("engine-args-text", Severity.WARNING)
OLD = Rule("engine-args-removed", Severity.WARNING)
RBLN = Rule("engine-args-rbln", Severity.ADVICE)
DECOUPLED = Rule("vllm-not-decoupled", Severity.ERROR)
TENSORS = Rule("vllm-tensors", Severity.ERROR)
INSTANCES = Rule("vllm-instances", Severity.ERROR)

VERSION = "0.32"
FILE = "model.json"  # in the version folder: vllm_backend, src/model.py
OLD_FILE = "vllm_engine_args.json"  # of the tutorials of 2023, whose model.py is a plain Python model
PARAMETER = "engine_args"  # of our own models on vLLM
# Argument: the parameter of our own models on vLLM that sets it.
_OWN = {"model": "model", "dtype": "dtype", "max_num_seqs": "slots", "max_model_len": "context"}
_WITHOUT_REQUEST_LOG = (25, 9)  # the first release of Triton with vLLM 0.10.1
_LORA = "multi_lora.json"
_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
_COMPILED = "compiled_model_dir"  # of vllm-rbln before 0.8.1, with device "rbln"
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

    is_old = repository.target is not None and repository.target.release < _WITHOUT_REQUEST_LOG
    yield from check_arguments(arguments, at, removed=None if is_old else OLD)
    weights = arguments.get("model")
    if weights is None or (weights == "" and not model.is_model_folder):
        what = "It names no model, and vLLM would serve its default, Qwen/Qwen3-0.6B."
        yield MISSING.at(at("model"), what, 'Add "model": a folder, or OWNER/NAME of the Hugging Face hub.')
    if str(arguments.get("enable_lora")).lower() == "true" and path.name == FILE and not is_file(path.parent / _LORA):
        what = f"Triton backend cannot find {_LORA}, which enable_lora needs beside {FILE}."
        yield MISSING.at(at("enable_lora"), what, f'Write {_LORA}: {{"name of the adapter": "/its/folder"}}')
    yield from _instances(model, arguments)


def _parameter(model: Model) -> Findings:
    place = model.at_entry("parameters", key=PARAMETER, within=("value", "string_value"))
    try:
        arguments = parse_json(model.parameters[PARAMETER] or "{}")
    except ValueError:
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
    yield from check_arguments({**own, **arguments}, lambda _: place, removed=UNKNOWN)  # its environment has new vLLM
    yield from _instances(model, arguments)


def _instances(model: Model, arguments: Mapping[str, Any]) -> Findings:
    """Find instances that would share GPUs, because vLLM itself chooses an instance's GPUs, from the first GPU on."""
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


# --- engine arguments --------------------------------------------------------------------------------------------


def check_arguments(
    arguments: Mapping[str, Any], at: Callable[[str], Place], *, removed: Rule | None = OLD
) -> Findings:
    """Find the mistakes in vLLM's engine arguments, JSON values by name; ``at`` returns the place of an argument.

    ``removed`` is the rule to report for an argument that only older vLLM has: ``OLD`` for a ``model.json``,
    ``UNKNOWN`` for shoal's own models, or None if the server's vLLM still has it. In a ``model.json``, ``device``
    "rbln" means RBLN's vLLM (vllm-rbln); RBLN's conditions between arguments are then checked, too.
    """
    is_rbln = arguments.get("device") == "rbln" and removed is not UNKNOWN
    if is_rbln:
        what = f"Only RBLN's vLLM (vllm-rbln) takes device rbln and {_COMPILED}; any other vLLM refuses to start."
        yield RBLN.at(at("device"), what, "For a GPU or a CPU, remove them.")
        yield from _rbln(arguments, at)
    for name, value in arguments.items():
        if name in _KINDS:
            yield from _check_value(name, value, at(name)) if value is not None else ()
        elif name in _OLD.split() and not (is_rbln and name == "device"):
            yield from _refuse_old(name, at(name), removed) if removed else ()
        elif not (is_rbln and name in ("device", _COMPILED)):
            yield _refuse(name, at(name))
    yield from _relations(arguments, at)


def _refuse_old(name: str, place: Place, rule: Rule) -> Findings:
    fix = "Remove it, or serve with the older vLLM."
    if name == "disable_log_requests":
        fix = "Remove it: vLLM no longer logs requests, unless enable_log_requests is true."
    yield rule.at(place, f"{name} is an argument of older vLLM; vLLM {VERSION} refuses it.", fix)


def _refuse(name: str, place: Place) -> Finding:
    if name == _COMPILED:
        what = f"{name} is an argument of RBLN's vLLM (vllm-rbln), with device rbln; any other vLLM refuses it."
        return UNKNOWN.at(place, what, 'Add "device": "rbln", or remove it.')
    advice = suggest(name.strip("-").replace("-", "_").lower(), _KINDS)
    fix = advice if advice.startswith("Did you mean") else "Remove it."
    return UNKNOWN.at(place, f"vLLM {VERSION} has no argument '{name}', and refuses to start.", fix)


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

_TYPES = {
    "bool": """aggregate_engine_logging allow_deprecated_quantization async_scheduling cudagraph_metrics
        data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb dcp_q_replicate
        disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
        disable_log_stats disable_nccl_for_dp_synchronization disable_sliding_window enable_batch_sharded_sampling
        enable_chunked_prefill enable_cumem_allocator enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb
        enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune enable_hc_sp
        enable_layerwise_nvtx_tracing enable_log_requests enable_logging_iteration_details enable_lora
        enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
        enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
        enable_nccl_comm_suspend enable_prefix_caching enable_prompt_embeds enable_return_routed_experts
        enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora enable_trace_replay enforce_eager
        fail_on_environ_validation fully_sharded_loras interleave_mm_strings jit_monitor_verbose kv_cache_metrics
        kv_sharing_fast_prefill language_model_only long_prefill_token_threshold_adaptive mm_device_do_normalize
        mm_encoder_only numa_bind ray_workers_use_nsight return_sampling_mask scheduler_reserve_full_isl
        skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay
        tokens_only trust_remote_code use_fp64_gumbel use_replayssm use_tqdm_on_load""",
    "int": """block_size cp_kv_cache_interleave_size cpu_distributed_timeout_seconds data_parallel_rank
        data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
        dbo_decode_token_threshold dbo_prefill_token_threshold dcp_kv_cache_interleave_size
        decode_context_parallel_size distributed_timeout_seconds dp_sync_interval elastic_ep_max_dp_size
        kv_cache_memory_bytes long_prefill_token_threshold mamba_block_size mamba_cache_philox_rounds master_port
        max_cpu_loras max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank max_loras max_model_len
        max_num_active_seqs max_num_batched_tokens max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
        max_num_seqs max_parallel_loading_workers mm_shm_cache_max_object_size_mb nnodes node_rank
        num_gpu_blocks_override offload_group_size offload_num_in_group offload_prefetch_step pipeline_parallel_size
        prefill_context_parallel_size prefill_schedule_interval prefix_cache_retention_interval prefix_match_unit
        renderer_num_workers replayssm_buffer_len safetensors_prefetch_block_size safetensors_prefetch_num_threads seed
        shutdown_timeout spec_tokens stream_interval tensor_parallel_size ubatch_size""",
    "float": """cpu_offload_gb gpu_memory_utilization kv_cache_metrics_sample kv_offloading_size
        mm_encoder_fp8_scale_save_margin mm_ipc_gpu_memory_gb mm_processor_cache_gb video_pruning_rate watermark""",
    "str": """all2all_backend allowed_local_media_path attention_backend code_revision config_format convert
        data_parallel_address data_parallel_backend dcp_comm_backend distributed_executor_backend download_dir dtype
        expert_placement_strategy gdn_prefill_backend generation_config hf_config_path io_processor_plugin
        jit_monitor_mode kda_decode_backend kda_prefill_backend kv_cache_dtype kv_offloading_backend linear_backend
        load_format log_config_file log_level logprobs_mode lora_dtype mamba_backend mamba_cache_dtype mamba_cache_mode
        mamba_ssm_cache_dtype mamba_ssu_algorithm master_addr mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm
        mm_processor_cache_type mm_processor_device mm_tensor_ipc model model_impl model_weights moe_backend
        offload_backend otlp_traces_endpoint per_request_spec_decode_metrics performance_mode prefix_caching_hash_algo
        quantization reasoning_parser reasoning_parser_plugin revision runner safetensors_load_strategy scheduler_cls
        scheduling_policy show_hidden_metrics_for_version sparse_indexer_topk_backend spec_method spec_model tokenizer
        tokenizer_mode tokenizer_revision video_pruning_method worker_cls worker_extension_cls""",
    "dict": """additional_config attention_config aux_output_config compilation_config custom_histogram_buckets
        default_mm_loras diffusion_config ec_manager_config ec_transfer_config engram_config eplb_config
        fault_tolerance_config hf_overrides ir_op_priority kernel_config kv_events_config kv_transfer_config
        limit_mm_per_prompt logging_config mamba_config media_io_kwargs mm_processor_kwargs model_class_overrides
        model_loader_extra_config override_generation_config pooler_config profiler_config quantization_config
        reasoning_config speculative_config structured_outputs_config watermark_config weight_transfer_config""",
    "list": """allowed_media_domains collect_detailed_traces cpu_offload_params cudagraph_capture_sizes device_ids
        kv_cache_dtype_skip_layers logits_processors lora_target_modules numa_bind_cpus numa_bind_nodes offload_params
        sleep_preserve_parameter_names""",
    "str list": "ignore_patterns served_model_name",
    "bool str": "hf_token",
    "dict str": "pt_load_map_location",
    "int str": "optimization_level",
}
_KINDS = {name: tuple(kinds.split()) for kinds, names in _TYPES.items() for name in names.split()}
# Arguments that only vLLM 0.2 to 0.9 has; vLLM's pull request 21739 removed disable_log_requests in 0.10.1.
_OLD = """calculate_kv_scales device disable_async_output_proc disable_log_requests disable_mm_preprocessor_cache
    enable_lora_bias enable_prompt_adapter engine_use_ray guided_decoding_backend logits_processor_pattern
    long_lora_scaling_factors lora_extra_vocab_size max_context_len_to_capture max_log_len max_paddings
    max_prompt_adapter_token max_prompt_adapters max_seq_len_to_capture multi_step_stream_outputs
    ngram_prompt_lookup_max ngram_prompt_lookup_min num_lookahead_slots num_scheduler_steps num_speculative_tokens
    override_neuron_config override_pooler_config preemption_mode rope_scaling rope_theta scheduler_delay_factor
    spec_decoding_acceptance_method speculative_disable_by_batch_size speculative_disable_mqa_scorer
    speculative_draft_tensor_parallel_size speculative_max_model_len speculative_model speculative_model_quantization
    swap_space task tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type use_v2_block_manager
    worker_use_ray"""
_EXPECTED = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "dict": "an object",
    "list": "a list",
}  # fmt: skip
