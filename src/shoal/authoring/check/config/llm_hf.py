"""Rules for engines of language models on transformers and ONNX Runtime: memory of their devices, quantisation."""

from __future__ import annotations

from collections import Counter

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.repository.engine_memory import find_excess
from shoal.authoring.repository.sizes import find_engines
from shoal.kit.generation.weights import INT4, INT8, NONE

MEMORY = Rule("engine-memory", Severity.ERROR)
QUANTIZE = Rule("engine-quantize", Severity.ERROR)


def find(model: Model, repository: Repository) -> Findings:
    """Find an engine that does not fit its device beside the others, or that cannot be quantised there."""
    if model.config is None or model.is_ensemble:
        return
    yield from _quantize(model)
    if repository.target is None or repository.target.is_embedded:  # containers may be on another machine
        yield from _memory(model, repository)


def _quantize(model: Model) -> Findings:
    kind = model.parameters.get("quantize", NONE)
    is_ours = any("shoal" in text for _, text in model.sources)
    place = model.at_entry("parameters", key="quantize", within=("value", "string_value"))
    groups = model.message.instance_group if model.message else ()
    if is_ours and kind in (INT8, INT4) and any(group.kind == group.KIND_CPU for group in groups):
        slow = {INT4: "computes in 4 bits on no processor"}.get(kind, "is slower there in 8 bits than in FP32")
        what = f"{model.name} is on the host, and its weights in {kind} are for an NVIDIA GPU: torchao {slow}."
        other = f"--engine openvino --quantize {kind}, or with " if "slots" in model.parameters else ""  # an engine
        yield QUANTIZE.at(place, what, f"Compose with {other}--placement gpu.")


def _memory(model: Model, repository: Repository) -> Findings:
    """Report, at the last engine on a device, that all of them do not fit it."""
    assert model.config is not None
    last = {line.pool: model.name for line in find_engines(model.config)}
    total = Counter[str]()
    for each in [model] if model.is_model_folder else repository.models if last else []:
        for line in find_engines(each.config) if each.config and not each.is_ensemble else ():
            total[line.pool] += line.total
            last[line.pool] = each.name
    if excess := find_excess({device: total[device] for device, name in sorted(last.items()) if name == model.name}):
        yield MEMORY.at(model.at("instance_group"), *excess)
