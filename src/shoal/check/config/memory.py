"""The memory that the largest batch takes, with the arithmetic shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from shoal.check.config.placement import build_graph
from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.component.spec import STRING
from shoal.errors import ShoalError
from shoal.repository.devices import is_on_gpu
from shoal.repository.graph import Edge, Graph
from shoal.repository.sizes import COPIES_IN_SHARED_MEMORY, CUDA_POOL_MIB, HEADROOM, MIB, Largest

POOL = Rule("cuda-pool-small", Severity.WARNING)
SHARED = Rule("shared-memory-small", Severity.WARNING)
RULES = (POOL, SHARED)

DOCKER_MIB = 64  # docker's default for /dev/shm
TEXT_BYTES = 1024  # per text, where no model limits its length
_GUESS = f"a dimension of -1 taken for {Largest(1).width}"
_POOL_FLAG = re.compile(r"--cuda-memory-pool-byte-size=\d+:(\d+)")


class Share(NamedTuple):
    """Bytes of one tensor, and how many copies of it there are."""

    name: str
    num_bytes: int
    factor: int


def find(model: Model, repository: Repository) -> Findings:
    """Whether the pools hold the largest batch of an ensemble."""
    graph = build_graph(model, repository)
    if graph is None:
        return
    try:
        pool, shared = _pool(graph), _shared(graph)
    except (ShoalError, OverflowError):  # a data type without a size of its own
        return
    place, rows = model.at("max_batch_size"), max(1, graph.config.spec.max_batch_size)
    limit = _pool_limit(repository)
    if HEADROOM * _sum(pool) > limit:
        yield POOL.at(
            place,
            f"The largest batch of {model.name}, {rows} rows, passes {_show(pool)} bytes between steps on the GPU"
            f" ({_GUESS}), and the pool has {limit:,}, which can never be used completely.",
            f"tritonserver --cuda-memory-pool-byte-size=0:{_round(HEADROOM * _sum(pool))}",
        )
    limit, where = _shared_limit(repository)
    if _sum(shared) > limit:
        yield SHARED.at(
            place,
            f"The largest batch of {model.name}, {rows} rows, takes {_show(shared)} bytes of shared memory ({_GUESS}),"
            f" and {where} has {limit:,}.",
            f"docker run --shm-size={_round(_sum(shared)) // MIB}m, or a smaller max_batch_size.",
        )


def _largest(graph: Graph, edge: Edge) -> int:
    said = {m.spec.parameters.get("max_text_bytes", "") for m in graph.members.values()}
    text_bytes = max((int(text) for text in said if text.isdecimal()), default=TEXT_BYTES)
    largest = Largest(max(1, graph.config.spec.max_batch_size), text_bytes=min(text_bytes, TEXT_BYTES))
    return largest.num_bytes(edge.tensor)


def _edges(graph: Graph) -> list[Edge]:
    """Edges of known size: one dimension at most is open, and none of texts."""
    return [edge for edge in graph.edges() if edge.tensor.dims.count(-1) <= (0 if edge.tensor.dtype == STRING else 1)]


def _pool(graph: Graph) -> list[Share]:
    """Tensors that steps on a GPU write; a tensor that two steps read counts once."""
    written = {}
    for edge in _edges(graph):
        if edge.source is not None and _on_gpu(graph, edge.source) and edge.tensor.dtype != STRING:
            written[edge.name] = Share(edge.name, _largest(graph, edge), 1)
    return list(written.values())


def _shared(graph: Graph) -> list[Share]:
    """Tensors that Python models receive and return on the host."""
    shares, edges = [], _edges(graph)
    for index, step in enumerate(graph.steps):
        member = graph.members[step.model]
        if member.backend != "python" and not member.message.runtime.endswith(".py"):
            continue
        for edge in edges:
            if index in (edge.source, edge.target) and not (edge.source is not None and _on_gpu(graph, edge.source)):
                factor = COPIES_IN_SHARED_MEMORY * member.spec.num_instances
                shares.append(Share(f"{step.model}: {edge.name}", _largest(graph, edge), factor))
    return shares


def _on_gpu(graph: Graph, step: int) -> bool:
    return is_on_gpu(graph.members[graph.steps[step].model])


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


def _sum(shares: list[Share]) -> int:
    return sum(share.num_bytes * share.factor for share in shares)


def _show(shares: list[Share]) -> str:
    """The sum and its largest parts."""
    largest = sorted(shares, key=lambda share: -share.num_bytes * share.factor)[:3]
    parts = [f"{s.name} {s.num_bytes:,}{f' x {s.factor}' if s.factor > 1 else ''}" for s in largest]
    return f"{' + '.join(parts)}{' + ...' if len(shares) > len(largest) else ''} = {_sum(shares):,}"


def _round(num_bytes: int) -> int:
    """Round up to whole multiples of Triton's own default."""
    return -(-num_bytes // (CUDA_POOL_MIB * MIB)) * CUDA_POOL_MIB * MIB
