"""Rules for the five models that NVIDIA's repository of TensorRT-LLM has around an engine, and for the engine's folder.

A model is known by its parameters and inputs, since its name may differ. Types of parameters are those with which the
backend (model_state.cc, model_instance_state.cc) and the models' own code read them: a value of another type is
replaced by the default, with a line in the log. A parameter that is empty, or still ``${...}``, is not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, entries, exists, is_file
from shoal.system.files import read_json

VALUE = Rule("trtllm-value", Severity.ERROR)
ENGINE = Rule("trtllm-engine", Severity.ERROR)
LIMIT = Rule("trtllm-engine-limit", Severity.ADVICE)
BATCH = Rule("trtllm-batch-size", Severity.ERROR)
DECOUPLED = Rule("trtllm-decoupled", Severity.ERROR)
SWAPPED = Rule("trtllm-swapped", Severity.ERROR)
DELAY = Rule("trtllm-queue-delay", Severity.WARNING)
TOKENIZER = Rule("trtllm-tokenizer", Severity.WARNING)
TOKENIZER_TYPE = Rule("trtllm-tokenizer-type", Severity.WARNING)

_PRE, _POST, _BLS, _LLM = "preprocessing", "postprocessing", "tensorrt_llm_bls", "tensorrt_llm"
_OWN_INPUT = {_PRE: "QUERY", _POST: "TOKENS_BATCH"}  # the input that only this model has
_YES = r"(?i:true|false|1|0|t|f|y|n|yes|no)"
_TYPES = {  # expected: (pattern, parameters)
    "a whole number": (r"-?\d+", """max_beam_width max_tokens_in_paged_kv_cache sink_token_length num_nodes
        kv_cache_host_memory_bytes cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms
        iter_stats_max_iterations request_stats_max_iterations lora_cache_optimal_adapter_size max_num_images
        lora_cache_max_adapter_size lora_cache_host_memory_bytes lookahead_window_size lookahead_ngram_size
        lookahead_verification_set_size cuda_graph_cache_size"""),
    "a number": (r"\d*\.?\d+|\d+\.", """kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction gpu_weights_percent
        lora_cache_gpu_memory_fraction"""),
    "true or false": (r"(?i:true|false|1|0)", """kv_cache_onboard_blocks exclude_input_in_output enable_kv_cache_reuse
        normalize_log_probs enable_chunked_context multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode
        speculative_decoding_fast_logits"""),
    "true or false, or yes or no": (_YES, "add_special_tokens skip_special_tokens accumulate_tokens"),
    "whole numbers, such as 0,1": (r"\d+( *[,;] *\d+)*", "max_attention_window_size gpu_device_ids participant_ids"),
    "V1, inflight_batching or inflight_fused_batching": (r"(?i:v1)|inflight(_fused)?_batching", "gpt_model_type"),
    "max_utilization or guaranteed_no_evict": (r"max_utilization|guaranteed_no_evict", "batch_scheduler_policy"),
}  # fmt: skip
_EXPECTED = {name: (words, pattern) for words, (pattern, names) in _TYPES.items() for name in names.split()}
_TOKENIZER_FILES = re.compile(r".*token.*|.*\.(model|tiktoken)|vocab\..*|tekken\.json", re.IGNORECASE)
_MAX_RANKS = 1024
_LONG = 1_000_000  # microseconds of a queue delay


def find(model: Model, repository: Repository) -> Findings:
    """Find mistakes in a model of NVIDIA's repository, alone and beside the others."""
    if model.message is None:
        return
    yield from find_values(model, repository)
    kind, other = _find_kind(model), {_PRE: _POST, _POST: _PRE}.get(model.name, "")
    names = {tensor.name for tensor in model.inputs}
    if other and _OWN_INPUT[other] in names and _OWN_INPUT[model.name] not in names:
        what = f"{model.name} has the input {_OWN_INPUT[other]}, which is that of {other}: the two are swapped."
        yield SWAPPED.at(model.at("input"), what, f"Exchange the folders {model.name} and {other}.")
    if kind in _OWN_INPUT:
        yield from _tokenizer(model, repository, kind)
    elif kind == _BLS:
        yield from _bls(model, repository)
    elif kind == _LLM:
        yield from _engine(model)


def is_unset(value: str) -> bool:
    """Whether NVIDIA's models take a parameter's value for none."""
    return not value or value.startswith("${") or "\0" in value


def find_unset_lines(model: Model) -> set[int]:
    """Return the lines of parameters that may keep their placeholder: NVIDIA's models have a default for them."""
    kind, given = _find_kind(model), model.parameters
    needed = (
        {"tokenizer_dir"} if kind in _OWN_INPUT else {"gpt_model_type", "gpt_model_path"} if kind == _LLM else set()
    )
    if not is_unset(given.get("encoder_model_path", "")):
        needed = {"gpt_model_type"}
    names = given.keys() - needed if kind else ()
    return {_at(model, name).line for name in names if re.fullmatch(r"\$\{\w+\}", given[name])}


def _find_kind(model: Model) -> str:
    """Return the name that the model has in NVIDIA's repository; empty if it is none of four."""
    given, names = model.parameters, {tensor.name for tensor in model.inputs}
    if "gpt_model_type" in given:
        return _LLM
    if given.keys() & {"tensorrt_llm_model_name", "accumulate_tokens"}:
        return _BLS
    return next((name for name, own in _OWN_INPUT.items() if own in names and "tokenizer_dir" in given), "")


def _at(model: Model, name: str) -> Place:
    return model.at_entry("parameters", key=name, within=("value", "string_value"))


def find_values(model: Model, _: Repository) -> Findings:
    """Find parameters of a wrong type, addresses in the place of folders, and delays of seconds."""
    if model.message is None or not _find_kind(model):
        return
    for name, value in model.parameters.items():
        expected, pattern = _EXPECTED.get(name, ("", ""))
        if is_unset(value):
            continue
        if expected and not re.fullmatch(pattern, value.strip()):
            what = f"{name} of {model.name} is '{value[:80]}', not {expected}: the model would not use it."
            yield VALUE.at(_at(model, name), what, f"Write {expected}; for the default, an empty text.")
        elif re.fullmatch(r"\w+_(dir|path)", name) and (found := re.match(r"\w+://", value)):
            what = f"{name} of {model.name} is {value[:200]}; the model opens a folder, and no {found[0]} address."
            yield VALUE.at(_at(model, name), what, "Download it, and write the path of the folder.")
    if (delay := model.message.dynamic_batching.max_queue_delay_microseconds) >= _LONG:
        what = f"{model.name} lets a request wait {delay / 1e6:g} s for others to compute with."
        place = model.at("dynamic_batching", "max_queue_delay_microseconds")
        yield DELAY.at(place, what, "Write microseconds: 10000 is 10 ms.")


def _tokenizer(model: Model, repository: Repository, kind: str) -> Findings:
    value = model.parameters["tokenizer_dir"]
    if "tokenizer_type" in model.parameters and model.sources and "tokenizer_type" not in model.sources[-1][1]:
        what = f"{model.name} has the parameter tokenizer_type, which its code does not read."
        yield TOKENIZER_TYPE.at(_at(model, "tokenizer_type"), what, "Remove it: the tokenizer's files say its type.")
    if is_unset(value) or "://" in value:
        return
    other = repository.known.get(_POST) if kind == _PRE else None
    theirs = other.parameters.get("tokenizer_dir", "") if other else ""
    if other and not is_unset(theirs) and os.path.realpath(value) != os.path.realpath(theirs):
        what = f"tokenizer_dir is {value[:200]} in {model.name}, and {theirs[:200]} in {other.name}."
        fix = "Write the same folder in both: one decodes what a model makes of the other's token ids."
        yield TOKENIZER.at(_at(model, "tokenizer_dir"), what, fix)
    files = entries(Path(value)) if value.startswith("/") else []
    if files and not any(_TOKENIZER_FILES.fullmatch(path.name) for path in files):
        what = f"tokenizer_dir of {model.name} is {value[:200]}, which has no file of a tokenizer."
        yield TOKENIZER.at(_at(model, "tokenizer_dir"), what, "Write the folder of tokenizer.json or tokenizer.model.")


def _bls(model: Model, repository: Repository) -> Findings:
    """Compare the BLS model with those that its code calls."""
    given = model.parameters.get("tensorrt_llm_model_name", "")
    llm = _LLM if is_unset(given) else given
    for member in (repository.known.get(name) for name in (_PRE, llm, _POST)):
        if member is None or member.message is None:
            continue
        ours, theirs = model.message.max_batch_size, member.message.max_batch_size
        if ours > theirs:
            what = f"{model.name} allows maximum batch size {ours}, and calls {member.name}, which allows {theirs}."
            fix = f"Write max_batch_size: {theirs} in {model.name}, or increase it in {member.name}."
            yield BATCH.at(model.at("max_batch_size"), what, fix)
        is_ours, is_theirs = (each.message.model_transaction_policy.decoupled for each in (model, member))
        if member.name == llm and is_ours != is_theirs:
            which, lost = (llm, "requests with stream") if is_ours else (model.name, f"its calls of {llm}")
            what = f"{model.name} and {llm} differ: {which} is not decoupled, and {lost} fail."
            fix = "Write the same in both; for answers in pieces, model_transaction_policy { decoupled: true }"
            yield DECOUPLED.at(model.at("model_transaction_policy", "decoupled"), what, fix)


def _engine(model: Model) -> Findings:
    """Compare the parameters with the engine, if its folder is here: it may be on the server alone."""
    value = model.parameters.get("gpt_model_path", "")
    # NVIDIA's commands put the engine into the version folder, and name it by a path of the server.
    places = [Path(value), *(model.folder / str(version) for version in model.versions)]
    folders = (path for path in places if path.is_absolute() and path.parts[-2:] == Path(value).parts[-2:])
    folder = next((path for path in folders if exists(path)), None)
    if is_unset(value) or folder is None:
        return
    place, about = _at(model, "gpt_model_path"), read_engine(folder)
    if about is None and model.is_model_folder and "artifacts" in model.parameters:
        return  # shoal compose brings the engine
    if about is None:
        what = f"gpt_model_path of {model.name} is {value[:200]}, which has no config.json of an engine."
        yield ENGINE.at(place, what, "Copy what trtllm-build wrote: config.json and rank0.engine.")
        return
    mapping, built = _part(_part(about, "pretrained_config"), "mapping"), _part(about, "build_config")
    size, tensor, pipeline, context = (_whole(mapping, f"{kind}_size", 1) for kind in ("world", "tp", "pp", "cp"))
    names = (f"rank{rank}.engine" for rank in range(min(size, _MAX_RANKS)))
    missing = [name for name in names if not is_file(folder / name)]
    if size != tensor * pipeline * context:
        what = f"An engine has world_size {size}, tp_size {tensor}, pp_size {pipeline} and cp_size {context}."
        yield ENGINE.at(Place(folder / "config.json"), what, "Build it again: world_size is their product.")
    elif missing:
        what = f"The engine of {model.name} was built for {size} ranks, and {folder.name} has no {missing[0]}."
        yield ENGINE.at(place, what, "Copy the files of all ranks, or convert the weights for another tp_size.")
    rows = str(model.message.max_batch_size)
    for rule, name, asked, most in (
        (ENGINE, "max_beam_width", model.parameters.get("max_beam_width", ""), "max_beam_width"),
        (LIMIT, "max_attention_window_size", model.parameters.get("max_attention_window_size", ""), "max_seq_len"),
        (LIMIT, "max_batch_size", rows, "max_batch_size"),
    ):
        number = max(map(int, re.findall(r"\d{1,12}", asked)), default=0)
        if 0 < (limit := _whole(built, most, 0)) < number:
            where = model.at(name) if asked is rows else _at(model, name)
            what = f"{name} of {model.name} is {number}; its engine, built with {most} {limit}, computes no more."
            yield rule.at(where, what, f"Write at most {limit}, or build with --{most} {number}.")


def read_engine(folder: Path) -> Mapping[str, Any] | None:
    """Return the ``config.json`` of an engine; None if there is none."""
    try:
        about = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) and about.keys() & {"build_config", "builder_config"} else None


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _whole(values: Mapping[str, Any], name: str, default: int) -> int:
    value = values.get(name, default)
    return value if isinstance(value, int) else default
