"""Rules for an ensemble's tensors in memory: copies between devices, and pools too small for the largest batch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shoal.authoring.check.findings import Findings, Place, Rule, Severity
from shoal.authoring.check.models import Model, Repository
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.graph import ROUND_TRIP, TO_OTHER_GPU, Edge, Graph, gets_host_copies, is_on_gpu
from shoal.authoring.repository.parameters import HOST_INPUTS
from shoal.authoring.repository.sizes import (
    CUDA_POOL_MIB,
    HEADROOM,
    MIB,
    Largest,
    Line,
    find_pools,
    find_shared,
    round_up,
)
from shoal.errors import ShoalError
from shoal.kit.component.spec import STRING

COPIES = Rule("gpu-tensor-copied-to-host", Severity.WARNING)
ROUND = Rule("host-round-trip", Severity.WARNING)
HOP = Rule("gpu-hop", Severity.WARNING)
MAY_HOP = Rule("gpu-may-hop", Severity.ADVICE)
POOL = Rule("cuda-pool-small", Severity.WARNING)
SHARED = Rule("shared-memory-small", Severity.WARNING)

DOCKER_MIB = 64  # docker's default for /dev/shm
TEXT_BYTES = 1024  # assumed bytes per text, unless the models' own limit is lower
_GUESS = f"a dimension of -1 counted as {Largest(1).width}"
_POOL_FLAG = re.compile(r"--cuda-memory-pool-byte-size=\d+:(\d+)")


def find(model: Model, repository: Repository) -> Findings:
    """Find tensors that are copied between devices, and memory that is too small for an ensemble's largest batch."""
    graph = _build_graph(model, repository)
    if graph is None:
        return
    for edge in graph.edges():
        if edge.source is not None and edge.target is not None:
            yield from _check_edge(model, repository, graph, edge)
    yield from _check_memory(model, repository, graph)


def _build_graph(model: Model, repository: Repository) -> Graph | None:
    """Build the graph of an ensemble's steps and tensors; None if the model is not a valid ensemble."""
    if model.message is None or not model.message.HasField("ensemble_scheduling") or model.is_misplatformed:
        return None
    try:
        names = sorted({step.model_name for step in model.message.ensemble_scheduling.step})
        assert model.config is not None
        members = {name: repository.configs[name] for name in names if name in repository.configs}
        return Graph.build(model.config, members)
    except ShoalError:  # other rules report the mistake
        return None


def _check_edge(model: Model, repository: Repository, graph: Graph, edge: Edge) -> Findings:
    assert edge.source is not None
    assert edge.target is not None
    source, target = (graph.members[graph.steps[step].model] for step in (edge.source, edge.target))
    place = _place(model, graph, edge)
    if edge.crossing == ROUND_TRIP and is_on_gpu(target) and gets_host_copies(target):
        yield COPIES.at(
            repository.known[target.name].at("instance_group"),
            f"{target.name} runs on the GPU and gets {edge.name} of {source.name}, on the GPU too, through the host.",
            f'Add parameters {{ key: "{HOST_INPUTS}" value {{ string_value: "no" }} }} to {target.name}.',
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
        rule, goes, fix = MAY_HOP, "may go", "Serve each GPU with a server and a repository of its own."
        if edge.crossing == TO_OTHER_GPU:
            rule, goes, fix = HOP, "goes", "Give both the same gpus: [ ... ]."
        yield rule.at(
            place, f"{edge.name} {goes} from {source.name} on GPU {first} to {target.name} on GPU {then}.", fix
        )


def _may_hop(source: ModelConfig, target: ModelConfig) -> bool:
    return is_on_gpu(source) and is_on_gpu(target) and min(len(_gpus(source)), len(_gpus(target))) > 1


def _gpus(config: ModelConfig) -> set[int]:
    return {gpu for group in config.message.instance_group for gpu in group.gpus}


def _place(model: Model, graph: Graph, edge: Edge) -> Place:
    """Return the place of the ``input_map`` entry by which the edge's target step reads the tensor."""
    assert edge.target is not None
    keys = [key for key, name in graph.steps[edge.target].inputs.items() if name == edge.name]
    return model.at_entry("ensemble_scheduling", "step", edge.target, "input_map", key=keys[0])


# --- memory ---------------------------------------------------------------------------------------------------------


def _check_memory(model: Model, repository: Repository, graph: Graph) -> Findings:
    """Find a CUDA pool or a shared memory that is too small for an ensemble's largest batch."""
    try:
        pool, shared = _find_lines(graph)
    except (ShoalError, OverflowError):  # a data type without a fixed size, or a size beyond all memory
        return
    place, rows = model.at("max_batch_size"), max(1, graph.config.spec.max_batch_size)
    limit, needed = _pool_limit(repository), sum(line.total for line in pool)
    if HEADROOM * needed > limit:
        yield POOL.at(
            place,
            f"The largest batch of {model.name}, {rows} rows, passes {_show(pool)} bytes between steps on the GPU"
            f" ({_GUESS}), and the pool has {limit:,}, which can never be used completely.",
            f"tritonserver --cuda-memory-pool-byte-size=0:{round_up(HEADROOM * needed, CUDA_POOL_MIB)}",
        )
    limit, where = _shared_limit(repository)
    needed = sum(line.total for line in shared)
    if needed > limit:
        yield SHARED.at(
            place,
            f"The largest batch of {model.name}, {rows} rows, takes {_show(shared)} bytes of shared memory ({_GUESS}),"
            f" and {where} has {limit:,}.",
            f"docker run --shm-size={round_up(needed, CUDA_POOL_MIB) // MIB}m, or a smaller max_batch_size.",
        )


def _find_lines(graph: Graph) -> tuple[list[Line], list[Line]]:
    """Return the tensors in the CUDA pool, and the tensors that Python models exchange through shared memory.

    Tensors of unknown size are left out: numeric tensors with several dimensions of -1, text tensors with any.
    """
    said = {m.spec.parameters.get("max_text_bytes", "") for m in graph.members.values()}
    text_bytes = max((int(text) for text in said if text.isdecimal()), default=TEXT_BYTES)
    largest = Largest(max(1, graph.config.spec.max_batch_size), text_bytes=min(text_bytes, TEXT_BYTES))
    edges = [edge for edge in graph.edges() if edge.tensor.dims.count(-1) <= (edge.tensor.dtype != STRING)]
    members = [graph.members[step.model] for step in graph.steps]

    def on_gpu(step: int) -> bool:
        return is_on_gpu(members[step])

    numeric = [edge for edge in edges if edge.tensor.dtype != STRING]
    pool = [line for line in find_pools(numeric, largest, on_gpu) if line.pool == "cuda"]
    shared = [
        line
        for index, member in enumerate(members)
        if member.backend == "python" or member.message.runtime.endswith(".py")
        for line in find_shared(graph, index, edges, largest, on_gpu, member.spec.num_instances)
    ]
    return pool, shared


def _pool_limit(repository: Repository) -> int:
    flags = " ".join(map(str, repository.manifest.get("launch", {}).get("flags") or ()))
    return min((int(size) for size in _POOL_FLAG.findall(flags)), default=CUDA_POOL_MIB * MIB)


def _shared_limit(repository: Repository) -> tuple[int, str]:
    given = repository.manifest.get("launch", {}).get("shared_memory")
    if isinstance(given, int):
        return given, "the manifest"
    if repository.target and repository.target.is_embedded and Path("/dev/shm").is_dir():
        status = os.statvfs("/dev/shm")
        return status.f_blocks * status.f_frsize, "/dev/shm here"
    return DOCKER_MIB * MIB, "a container's /dev/shm"


def _show(lines: list[Line]) -> str:
    """Format the bytes of the three largest tensors and of all: ``a: X 400 x 2 + b: Y 300 + c: Z 20 + ... = 1,130``.

    ``a: X 400 x 2`` is the tensor X of the model a, with 400 bytes in each of two instances.
    """
    largest = sorted(lines, key=lambda line: -line.total)[:3]
    parts = [f"{line.what} {line.num_bytes:,}{f' x {line.factor}' if line.factor > 1 else ''}" for line in largest]
    rest = " + ..." if len(lines) > len(largest) else ""
    return f"{' + '.join(parts)}{rest} = {sum(line.total for line in lines):,}"
