"""Rules for NVIDIA's text-level form of TensorRT-LLM: a Python model that reads ``model.yaml`` beside its code.

Its code passes the fields to ``tensorrt_llm.LLM``, which refuses a name that it does not know, but for
``triton_config``, from which it sets the batch size and the transaction policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository, is_file
from shoal.system.files import read_text

CONFIG = Rule("llmapi-config", Severity.ERROR)
MISSPELT = Rule("llmapi-misspelt", Severity.WARNING)

FILE = "model.yaml"
_TRITON = "triton_config"
_FIELDS = {"max_batch_size", "decoupled"}  # of triton_config, without which the model does not load
_OTHERS = {"cancellation_check_period_ms", "multimodal"}
_ONE_TEXT = "only supports text_input being a 1D tensor"  # in the code: any batch size above 0 makes it two-dimensional
_MAX = 2**18  # bytes
_CLOSE = 0.85  # least difflib ratio of a misspelt name and the right one
_NUMBERS = """max_batch_size max_input_len max_seq_len max_beam_width max_num_tokens tensor_parallel_size
    pipeline_parallel_size context_parallel_size"""
# Usual arguments of tensorrt_llm.LLM, of releases 0.19 to 1.3.
_NAMES = f"""{_NUMBERS} {_TRITON} attn_backend backend batched_logits_processor build_config cuda_graph_config
    disable_overlap_scheduler dtype enable_attention_dp enable_autotuner enable_chunked_prefill
    enable_iter_perf_stats enable_iter_req_stats enable_lora enable_overlap_scheduler encoder_max_num_tokens
    gpus_per_node guided_decoding_backend iter_stats_max_iterations kv_cache_config load_format
    logits_post_processors lora_config model moe_cluster_parallel_size moe_config moe_expert_parallel_size
    moe_max_num_tokens moe_tensor_parallel_size num_postprocess_workers peft_cache_config print_iter_log
    pytorch_backend_config quant_config reasoning_parser request_stats_max_iterations return_perf_metrics revision
    scheduler_config skip_tokenizer_init speculative_config stream_interval tokenizer tokenizer_mode
    tokenizer_revision torch_compile_config trust_remote_code"""

_Content: TypeAlias = tuple[Mapping[Any, Any], Mapping[str, int], str]


def find(model: Model, _: Repository) -> Findings:
    """Find mistakes in a ``model.yaml``, and between it and ``config.pbtxt``."""
    codes = {path.parent: code for path, code in model.sources if _TRITON in code}
    for folder in (model.folder / str(version) for version in model.served_versions):
        if model.message is None or not model.is_python or folder not in codes or not is_file(folder / FILE):
            continue
        try:
            text = read_text(folder / FILE, _MAX)
        except (OSError, ValueError):
            yield CONFIG.at(Place(folder / FILE), "It cannot be read.", "Write it as UTF-8 text of at most 256 KiB.")
            continue
        content = _read(text)
        yield from _judge(folder / FILE, content)
        yield from _beside(model, folder / FILE, content, codes[folder])


def find_yaml(path: Path, text: str) -> Findings:
    """Find mistakes in the text of a ``model.yaml``; of another name, only whether it is YAML."""
    yield from _judge(path, _read(text))


def _judge(path: Path, content: _Content) -> Findings:
    fields, lines, problem = content
    if problem:
        yield CONFIG.at(Place(path, lines.get(problem, 0)), f"It is not YAML: {problem}.", "Fix that line.")
    if problem or (path.name != FILE and _TRITON not in fields):
        return
    triton = fields.get(_TRITON)
    triton = triton if isinstance(triton, dict) else {}
    if lacking := sorted(_FIELDS - triton.keys()):
        what = f"{_TRITON} has no {' and no '.join(lacking)}: the model does not load."
        yield CONFIG.at(Place(path, lines.get(_TRITON, 0)), what, f"Write {lacking[0]} into it.")
    named = [(name, name, value, _NAMES.split()) for name, value in fields.items()]
    named += [(f"{_TRITON}.{name}", name, value, [*_FIELDS, *_OTHERS]) for name, value in triton.items()]
    for path_to, name, value, known in named:
        place = Place(path, lines.get(str(path_to), 0))
        shown = str(value)[:200] if isinstance(value, str | int | float) else type(value).__name__
        if near := get_close_matches(str(name), known, 1, _CLOSE) if name not in known else ():
            what = f"TensorRT-LLM has the field {near[0]}; '{name}' is not known here."
            yield MISSPELT.at(place, what, f"Did you mean {near[0]}?")
        if name in _NUMBERS.split() and value is not None and not shown.isdecimal():
            yield CONFIG.at(place, f"{name} is '{shown}', not a whole number.", "Write a whole number.")
        elif name == "decoupled" and not isinstance(value, bool | int):
            what = f"decoupled is '{shown}', not true or false: any text counts as true."
            yield CONFIG.at(place, what, "Write true or false, without quotes.")
        elif name in ("model", "tokenizer") and "://" in shown:
            what = f"{name} is {shown}, and must be a folder, or OWNER/NAME of the Hugging Face hub."
            yield CONFIG.at(place, what, "Write one of the two.")


def _beside(model: Model, path: Path, content: _Content, code: str) -> Findings:
    """Compare ``triton_config`` with the model's configuration and code."""
    fields, lines, _ = content
    triton = fields.get(_TRITON)
    if not isinstance(triton, dict):
        return
    rows, ours, fix = triton.get("max_batch_size"), model.message.max_batch_size, f"Leave it to {FILE}, which sets it."
    if isinstance(rows, int) and ours > rows:
        what = f"max_batch_size is {ours} in config.pbtxt, and {rows} in {FILE}: the model does not load."
        yield CONFIG.at(model.at("max_batch_size"), what, fix)
    elif isinstance(rows, int) and rows > 0 and _ONE_TEXT in code:
        what = f"max_batch_size is {rows}, and the model's code takes one text: every request would fail."
        yield CONFIG.at(Place(path, lines.get(f"{_TRITON}.max_batch_size", 0)), what, "Write max_batch_size: 0")
    policy, is_decoupled = model.message.model_transaction_policy, bool(triton.get("decoupled"))
    if model.message.HasField("model_transaction_policy") and policy.decoupled != is_decoupled:
        what = f"decoupled is {is_decoupled} in {FILE}, and {policy.decoupled} here: the model does not load."
        yield CONFIG.at(model.at("model_transaction_policy"), what, fix)


def _read(text: str) -> _Content:
    """Read the fields, the lines of all names, and why it is not YAML, with the line of that as if it were a name."""
    try:
        import yaml
    except ModuleNotFoundError:  # huggingface_hub brings it: only a broken installation lacks it
        return {}, {}, "PyYAML, which reads it, is not installed"
    try:
        fields, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        problem = str(error.problem or error.context)
        return {}, {problem: error.problem_mark.line + 1} if error.problem_mark else {}, problem
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return {}, {}, " ".join(str(error).split())[:200]
    if not isinstance(fields, dict) or not isinstance(node, yaml.MappingNode):
        return {}, {}, "it has no fields"
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    inner = (value.value for key, value in node.value if key.value == _TRITON and isinstance(value, yaml.MappingNode))
    return fields, lines | {f"{_TRITON}.{key.value}": key.start_mark.line + 1 for each in inner for key, _ in each}, ""
