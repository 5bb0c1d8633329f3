"""Memory that a plan needs: CUDA pool, pinned pool and shared memory, with the calculation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from shoal.authoring.environment.targets import EMBEDDED
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.devices import PYTHON_BASED_BACKENDS, find_gpus
from shoal.authoring.repository.engine_memory import HOST, find_engine_memory
from shoal.authoring.repository.graph import Edge, Graph, is_on_gpu
from shoal.authoring.repository.plan import Plan
from shoal.kit.component.spec import STRING, TensorSpec

MIB = 2**20
POOLS = ("cuda", "pinned", "shared")
CUDA_POOL_MIB = 64  # default of Triton; pool sizes are rounded up to multiples of it
PINNED_POOL_MIB = 256  # default of Triton, used like CUDA_POOL_MIB
HEADROOM = 2  # a pool gives out contiguous blocks, and is never filled to the last byte
COPIES_IN_SHARED_MEMORY = 3  # of each tensor, while a batch goes to a stub and the answer returns
INSTANCE_MIB = 2  # shared memory of an instance, without tensors


@dataclass(frozen=True)
class Largest:
    """Largest request that memory is sized for: its rows, the size of dimensions that are -1, the bytes per text."""

    rows: int
    width: int = 256  # size of a dimension that is -1
    text_bytes: int = 65_536  # per text; for a dimension of -1, such as labels, all texts of a row together

    def num_bytes(self, tensor: TensorSpec) -> int:
        """Return the size in bytes of a tensor in the largest request."""
        if tensor.dtype == STRING:
            return self.rows * prod(size for size in tensor.dims if size > 0) * self.text_bytes
        elements = self.rows * prod(self.width if size < 0 else size for size in tensor.dims)
        return elements * tensor.item_bytes


@dataclass(frozen=True)
class Line:
    """Memory in one pool: ``num_bytes`` times ``factor``, a number of requests or of instances.

    ``pool`` is ``cuda``, ``pinned`` or ``shared``, for a tensor; or, for an engine, its device: ``host`` or ``GPU 0``.
    """

    pool: str
    what: str
    num_bytes: int
    factor: int

    @property
    def total(self) -> int:
        """Memory of this line, in bytes."""
        return self.num_bytes * self.factor


@dataclass(frozen=True)
class Sizes:
    """Memory that a plan needs, in bytes: ``cuda_pool`` on each GPU; ``pinned_pool`` and ``shared_memory`` on the host.

    Without a GPU, Triton has no pools. ``engines`` are the bytes of the engines of language models, by device.
    """

    gpus: tuple[int, ...]
    lines: tuple[Line, ...]

    def _sum(self, pool: str) -> int:
        return sum(line.total for line in self.lines if line.pool == pool)

    @property
    def cuda_pool(self) -> int:
        """Size of each GPU's pool, in bytes; 0 without a GPU."""
        return round_up(HEADROOM * self._sum("cuda"), CUDA_POOL_MIB) if self.gpus else 0

    @property
    def pinned_pool(self) -> int:
        """Size of the server's pinned pool, in bytes; 0 without a GPU."""
        if not self.gpus:
            return 0
        return round_up(self._sum("pinned"), PINNED_POOL_MIB)

    @property
    def shared_memory(self) -> int:
        """Size that ``/dev/shm`` must have, in bytes."""
        return round_up(self._sum("shared"), 64)

    @property
    def engines(self) -> dict[str, int]:
        """Bytes of the engines of language models on each device that has some: ``host``, ``GPU 0``, ...."""
        devices = dict.fromkeys(line.pool for line in self.lines if line.pool not in POOLS)
        return {device: self._sum(device) for device in devices}

    def explain(self) -> list[str]:
        """Return the calculation as text: one line for each ``Line``, one for each pool, and one for shared memory."""
        told = [
            f"{line.pool:6} {line.what}: {line.num_bytes:,} x {line.factor} = {line.total:,}" for line in self.lines
        ]
        pools = [
            f"CUDA pool, of each GPU: {HEADROOM} x {self._sum('cuda'):,} -> {self.cuda_pool:,}",
            f"pinned pool: {self._sum('pinned'):,} -> {self.pinned_pool:,}",
        ]
        shared = f"shared memory: {self._sum('shared'):,} -> {self.shared_memory:,}"
        engines = [f"engines, on {device}: {size:,}" for device, size in self.engines.items()]
        return [*told, *(pools if self.gpus else []), shared, *engines]

    def as_dict(self) -> dict[str, Any]:
        """Return the lines, the pool sizes and the launch flags, ready for JSON."""
        lines = [{**asdict(line), "total": line.total} for line in self.lines]
        pools = {name: getattr(self, name) for name in ("cuda_pool", "pinned_pool", "shared_memory")}
        return {"lines": lines, **pools, "engines": self.engines, "flags": self.flags()}

    def flags(self) -> list[str]:
        """Return the tritonserver flags that set the pool sizes; empty without a GPU, since there are no pools."""
        if not self.gpus:
            return []
        pools = [f"--cuda-memory-pool-byte-size={gpu}:{self.cuda_pool}" for gpu in self.gpus]
        return [*pools, f"--pinned-memory-pool-byte-size={self.pinned_pool}"]


def round_up(num_bytes: int, step_mib: int) -> int:
    """Round bytes up to a multiple of ``step_mib`` MiB that is not 0."""
    step = step_mib * MIB
    return max(1, -(-num_bytes // step)) * step


def find_sizes(graph: Graph, plan: Plan, largest: Largest | None = None) -> Sizes:
    """Compute the memory that ``graph``, whose models are placed, needs under ``plan``.

    A tensor is on the device of the step that writes it, and the request's tensors are on the host. Any request may use
    any GPU, so each GPU's pool is sized for all requests.
    """
    largest = largest or Largest(graph.config.spec.max_batch_size)
    edges = graph.edges()
    lines: list[Line] = []

    members = [graph.members[step.model] for step in graph.steps]
    gpus = find_gpus(members, plan)

    def on_gpu(step: int) -> bool:
        return is_on_gpu(members[step])

    if gpus:
        lines += find_pools(edges, largest, on_gpu, plan.concurrency)
    for index, step in enumerate(graph.steps):
        config = graph.members[step.model]
        lines += find_engines(config)
        if config.backend == "python" or (plan.target == EMBEDDED and config.backend in PYTHON_BASED_BACKENDS):
            num_instances = _count_instances(config)
            lines.append(Line("shared", f"{step.model}: regions", INSTANCE_MIB * MIB, num_instances))
            lines += find_shared(graph, index, edges, largest, on_gpu, num_instances)
    return Sizes(gpus, tuple(lines))


def find_pools(
    edges: Iterable[Edge], largest: Largest, is_on_gpu: Callable[[int], bool], concurrency: int = 1
) -> Iterator[Line]:
    """Yield the memory of each tensor that a step writes, in the pool of that step's device.

    ``is_on_gpu`` tells whether the step of an index is on a GPU. A tensor that two steps read counts once. The
    request's tensors stay in the buffers that received them, and need no pool.
    """
    seen: set[str] = set()
    for edge in edges:
        if edge.name not in seen and edge.source is not None:
            seen.add(edge.name)
            pool = "cuda" if is_on_gpu(edge.source) else "pinned"
            yield Line(pool, edge.name, largest.num_bytes(edge.tensor), concurrency)


def find_shared(
    graph: Graph,
    step: int,
    edges: Iterable[Edge],
    largest: Largest,
    is_on_gpu: Callable[[int], bool],
    num_instances: int,
) -> Iterator[Line]:
    """Yield the shared memory for each host tensor that a step's model reads or writes, once per instance."""
    for edge in edges:
        if step in (edge.source, edge.target) and not (edge.source is not None and is_on_gpu(edge.source)):
            num_bytes = largest.num_bytes(edge.tensor) * COPIES_IN_SHARED_MEMORY
            yield Line("shared", f"{graph.steps[step].model}: {edge.name}", num_bytes, num_instances)


def find_engines(config: ModelConfig) -> Iterator[Line]:
    """Yield the memory of a language model's engine on each of its devices; nothing for any other model."""
    for group in config.message.instance_group:
        is_on_gpu = group.kind == group.KIND_GPU
        memory = find_engine_memory(config, on_gpu=is_on_gpu)
        for device in [f"GPU {gpu}" for gpu in group.gpus or (0,)] if is_on_gpu else [HOST]:
            for what, num_bytes in asdict(memory).items() if memory else ():
                yield Line(device, f"{config.name}: {what}", num_bytes, max(1, group.count))


def _count_instances(config: ModelConfig) -> int:
    return sum(max(1, group.count) * max(1, len(group.gpus)) for group in config.message.instance_group)
