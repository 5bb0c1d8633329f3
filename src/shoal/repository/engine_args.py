"""Check of vLLM's engine arguments, as Triton's vLLM backend reads them from ``model.json``.

The backend calls ``AsyncEngineArgs(**json)``: a plain dataclass, so an unknown name raises TypeError, and a value of a
wrong type is kept as it is. Nothing of vLLM is imported here: the names and types below are those of vLLM 0.32
(vllm/engine/arg_utils.py), ranges and relations those of vllm/config.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from shoal.errors import suggest

VERSION = "0.32"
FILE = "model.json"  # in the version folder: vllm_backend, src/model.py
OLD_FILE = "vllm_engine_args.json"  # of the tutorials of 2023, whose model.py is a plain Python model

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
# Of vLLM 0.2 to 0.9; vLLM's pull request 21739 removed disable_log_requests in 0.10.1.
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
_COMPILED = "compiled_model_dir"  # of vllm-rbln before 0.8.1, with device "rbln"
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
_LEAST = {
    -1: "max_logprobs max_model_len",
    0: """cpu_offload_gb data_parallel_rank data_parallel_size_local long_prefill_token_threshold max_num_queued_reqs
        max_num_queued_tokens mm_processor_cache_gb node_rank offload_group_size offload_prefetch_step ubatch_size""",
    1: """block_size data_parallel_size decode_context_parallel_size max_loras max_num_active_seqs
        max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_parallel_loading_workers nnodes
        pipeline_parallel_size prefill_context_parallel_size stream_interval tensor_parallel_size""",
}
_MINIMUM = {name: least for least, names in _LEAST.items() for name in names.split()}
_EXPECTED = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "dict": "an object",
    "list": "a list",
}  # fmt: skip


class Kind(Enum):
    """Kinds of faults: an unknown argument; one of older vLLM, or of RBLN's; a value as text; a wrong value."""

    UNKNOWN = "unknown"
    OLD = "old"
    RBLN = "rbln"
    TEXT = "text"
    VALUE = "value"


@dataclass(frozen=True)
class Fault:
    """A mistake in the argument ``name``: ``what`` was found, and the ``fix``."""

    kind: Kind
    name: str
    what: str
    fix: str


def check_arguments(arguments: Mapping[str, Any], compiled_batch: int | None = None) -> Iterator[Fault]:
    """Find the mistakes in engine arguments, given as JSON values by name.

    ``compiled_batch`` is the batch size that an RBLN model was compiled for, where it is known. With ``device`` "rbln",
    the arguments are those of RBLN's vLLM, and its relations are checked beside vLLM's.
    """
    is_rbln = arguments.get("device") == "rbln"
    if is_rbln:
        what = f"Only RBLN's vLLM (vllm-rbln) takes device rbln and {_COMPILED}; any other vLLM refuses to start."
        yield Fault(Kind.RBLN, "device", what, "For a GPU or a CPU, remove them.")
        yield from _rbln(arguments, compiled_batch)
    for name, value in arguments.items():
        if name in _KINDS:
            yield from _check_value(name, value) if value is not None else ()
        elif not (is_rbln and name in ("device", _COMPILED)):
            yield _refuse(name)
    yield from _relations(arguments)


def _refuse(name: str) -> Fault:
    if name in _OLD.split():
        fix = "Remove it, or serve with the older vLLM."
        if name == "disable_log_requests":
            fix = "Remove it: vLLM no longer logs requests, unless enable_log_requests is true."
        return Fault(Kind.OLD, name, f"{name} is an argument of older vLLM; vLLM {VERSION} refuses it.", fix)
    if name == _COMPILED:
        what = f"{name} is an argument of RBLN's vLLM (vllm-rbln), with device rbln; any other vLLM refuses it."
        return Fault(Kind.UNKNOWN, name, what, 'Add "device": "rbln", or remove it.')
    advice = suggest(name.strip("-").replace("-", "_").lower(), _KINDS)
    fix = advice if advice.startswith("Did you mean") else "Remove it."
    return Fault(Kind.UNKNOWN, name, f"vLLM {VERSION} has no argument '{name}', and refuses to start.", fix)


def _check_value(name: str, value: Any) -> Iterator[Fault]:
    kinds = _KINDS[name]
    expected = " or ".join(_EXPECTED[kind] for kind in kinds)
    shown = json.dumps(value)[:80]
    if not any(_is(value, kind) for kind in kinds):
        meant = _read(value, kinds[0])
        if meant is not None:
            counts = "any text but the empty one counts as true" if kinds[0] == "bool" else "vLLM does not convert it"
            what = f"{name} is the text {shown}, not {expected}: {counts}."
            yield Fault(Kind.TEXT, name, what, f'Write "{name}": {json.dumps(meant)}')
        else:
            yield Fault(Kind.VALUE, name, f"{name} is {shown}, not {expected}.", f"Write {expected}, or remove {name}.")
    elif name in _MINIMUM and value < _MINIMUM[name]:
        what, least = f"{name} is {shown}, and must be at least {_MINIMUM[name]}.", max(1, _MINIMUM[name])
        yield Fault(Kind.VALUE, name, what, f'Write "{name}": {least} or more, or remove it.')
    elif name == "gpu_memory_utilization" and not 0 < value <= 1:
        what = f"{name} is {shown}, and must be above 0 and at most 1: the share of the GPU's memory."
        yield Fault(Kind.VALUE, name, what, f'For example: "{name}": 0.9')
    elif name == "dtype" and value not in _DTYPES:
        yield Fault(Kind.VALUE, name, f"Unknown dtype {shown}.", suggest(value, _DTYPES))


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "bool"
    types: dict[str, type | tuple[type, ...]] = {"float": (int, float), "int": int, "str": str, "dict": dict}
    return kind != "bool" and isinstance(value, types.get(kind, list)) and not (kind == "float" and value != value)


def _read(value: Any, kind: str) -> bool | float | None:
    """Return the value that a text stands for, None where it is not one of ``kind``."""
    if not isinstance(value, str):
        return None
    if kind == "bool":
        return {"true": True, "false": False}.get(value.strip().lower())
    try:
        read = {"int": int, "float": float}[kind](value)
    except (KeyError, ValueError):
        return None
    return read if math.isfinite(read) else None


def _relations(arguments: Mapping[str, Any]) -> Iterator[Fault]:
    """vLLM's own relations: vllm/config/scheduler.py, verify_max_model_len; vllm/config/lora.py."""
    least = [("max_num_batched_tokens", "max_num_seqs"), ("max_num_seqs", "max_num_active_seqs")]
    least += [("max_model_len", "long_prefill_token_threshold"), ("max_cpu_loras", "max_loras")]
    if arguments.get("enable_chunked_prefill") is False:
        least.append(("max_num_batched_tokens", "max_model_len"))
    for large, small in least:
        more, less = _whole(arguments, large), _whole(arguments, small)
        if more and less and 0 < more < less:
            where = " without chunked prefill" if small == "max_model_len" else ""
            what = f"{large} ({more}) must be at least {small} ({less}){where}."
            yield Fault(Kind.VALUE, large, what, f"Increase {large}, or decrease {small}.")


def _rbln(arguments: Mapping[str, Any], compiled_batch: int | None) -> Iterator[Fault]:
    """RBLN's relations: its tutorials for Triton, and its configuration guide for block_size (docs.rbln.ai)."""
    names = ("max_model_len", "max_num_batched_tokens", "block_size", "max_num_seqs")
    longest, tokens, block, seqs = (_whole(arguments, name) for name in names)
    if longest and tokens and tokens != longest:
        what = f"max_num_batched_tokens ({tokens}) must equal max_model_len ({longest}) on device rbln."
        yield Fault(Kind.VALUE, "max_num_batched_tokens", what, "Write the length that the model was compiled for.")
    if longest and block and longest % block:
        what = f"block_size ({block}) must equal max_model_len ({longest}), or divide it, on device rbln."
        yield Fault(Kind.VALUE, "block_size", what, f'Write "block_size": {longest}')
    if compiled_batch and seqs and seqs != compiled_batch:
        what = f"max_num_seqs is {seqs}, and the model was compiled for batches of {compiled_batch}."
        yield Fault(Kind.VALUE, "max_num_seqs", what, f'Write "max_num_seqs": {compiled_batch}')
    model, folder = (PurePath(str(arguments.get(key, ""))).name for key in ("model", _COMPILED))
    if model.startswith("rbln-") and folder.startswith("rbln-") and model != folder:
        what = f"model is {model} and compiled_model_dir is {folder}: two compiled models."
        yield Fault(Kind.VALUE, _COMPILED, what, "Name the same folder in both.")


def _whole(arguments: Mapping[str, Any], name: str) -> int | None:
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
