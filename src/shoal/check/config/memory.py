"""Memory that the largest batch of an ensemble takes in the CUDA pool and in shared memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shoal.check.config.placement import build_graph
from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.component.spec import STRING
from shoal.errors import ShoalError
from shoal.repository.devices import is_on_gpu
from shoal.repository.graph import Graph
from shoal.repository.sizes import CUDA_POOL_MIB, HEADROOM, MIB, Largest, Line, find_pools, find_shared, round_up

POOL = Rule("cuda-pool-small", Severity.WARNING)
SHARED = Rule("shared-memory-small", Severity.WARNING)

DOCKER_MIB = 64  # docker's default for /dev/shm
TEXT_BYTES = 1024  # bytes per text, unless the models limit it
_GUESS = f"a dimension of -1 counted as {Largest(1).width}"
_POOL_FLAG = re.compile(r"--cuda-memory-pool-byte-size=\d+:(\d+)")


def find(model: Model, repository: Repository) -> Findings:
    """Find ensembles whose largest batch does not fit into the CUDA pool or the shared memory."""
    graph = build_graph(model, repository)
    if graph is None:
        return
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
    """Find the tensors in the CUDA pool, and those that Python models receive and return on the host.

    Only tensors of roughly known size count: those with at most one dimension of -1, and texts without any.
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
    """Format the sum with its three largest parts: ``a: X 400 x 2 + b: Y 300 + c: Z 20 + ... = 1,130``."""
    largest = sorted(lines, key=lambda line: -line.total)[:3]
    parts = [f"{line.what} {line.num_bytes:,}{f' x {line.factor}' if line.factor > 1 else ''}" for line in largest]
    rest = " + ..." if len(lines) > len(largest) else ""
    return f"{' + '.join(parts)}{rest} = {sum(line.total for line in lines):,}"
