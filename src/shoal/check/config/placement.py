"""Placement of an ensemble's tensors: copies between devices, which Triton makes without a message."""

from __future__ import annotations

from shoal.check.findings import Findings, Place, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.errors import ShoalError
from shoal.repository.config import ModelConfig
from shoal.repository.devices import ROUND_TRIP, TO_OTHER_GPU, gets_host_copies, is_on_gpu
from shoal.repository.graph import Edge, Graph

COPIES = Rule("gpu-tensor-copied-to-host", Severity.WARNING)
ROUND = Rule("host-round-trip", Severity.WARNING)
HOP = Rule("gpu-hop", Severity.WARNING)


def find(model: Model, repository: Repository) -> Findings:
    """Find the tensors of an ensemble that are copied between devices."""
    graph = build_graph(model, repository)
    if graph is None:
        return
    for edge in graph.edges():
        if edge.source is not None and edge.target is not None:
            yield from _edge(model, repository, graph, edge)


def build_graph(model: Model, repository: Repository) -> Graph | None:
    """Build the graph of an ensemble; None if the model is not an ensemble, or not a valid one."""
    if model.message is None or not model.message.HasField("ensemble_scheduling") or model.is_misplatformed:
        return None
    try:
        names = sorted({step.model_name for step in model.message.ensemble_scheduling.step})
        assert model.config is not None
        members = {name: config for name in names if (config := repository.find_config(name)) is not None}
        return Graph.build(model.config, members)
    except ShoalError:  # other rules report it
        return None


def _edge(model: Model, repository: Repository, graph: Graph, edge: Edge) -> Findings:
    assert edge.source is not None
    assert edge.target is not None
    source, target = (graph.members[graph.steps[step].model] for step in (edge.source, edge.target))
    place = _place(model, graph, edge)
    if edge.crossing == ROUND_TRIP and is_on_gpu(target) and gets_host_copies(target):
        key = "FORCE_CPU_ONLY_INPUT_TENSORS"
        yield COPIES.at(
            repository.known[target.name].at("instance_group"),
            f"{target.name} runs on the GPU and gets {edge.name} of {source.name}, on the GPU too, through the host.",
            f'Add parameters {{ key: "{key}" value {{ string_value: "no" }} }} to {target.name}.',
        )
    elif edge.crossing == ROUND_TRIP:
        yield ROUND.at(
            place,
            f"{edge.name} goes from {source.name} on the GPU to {target.name} on the host, and the result goes"
            " back to the GPU.",
            f"Let {target.name} run on the GPU (KIND_GPU), or move it to the pipeline's end.",
        )
    elif edge.crossing == TO_OTHER_GPU or _may_hop(source, target):
        first, then = (sorted(_gpus(config)) for config in (source, target))
        yield HOP.at(
            place,
            f"{edge.name} goes from {source.name} on GPU {first} to {target.name} on GPU {then}.",
            "Give both the same gpus: [ ... ]. To use several GPUs, write an ensemble for each.",
        )


def _may_hop(source: ModelConfig, target: ModelConfig) -> bool:
    return is_on_gpu(source) and is_on_gpu(target) and min(len(_gpus(source)), len(_gpus(target))) > 1


def _gpus(config: ModelConfig) -> set[int]:
    return {gpu for group in config.message.instance_group for gpu in group.gpus}


def _place(model: Model, graph: Graph, edge: Edge) -> Place:
    """Return the place where the step that reads the tensor maps it."""
    assert edge.target is not None
    keys = [key for key, name in graph.steps[edge.target].inputs.items() if name == edge.name]
    return model.at_entry("ensemble_scheduling", "step", edge.target, "input_map", key=keys[0])
