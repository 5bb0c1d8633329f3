"""Per-step timings of a pipeline under load, from Triton's statistics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from shoal.errors import ServerError
from shoal.server.launch import Server

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Counters:
    """Triton's counters of one model; subtract two readings for the time between them.

    Nanoseconds are summed over requests, each charged with the whole time of its batch; only ``busy_ns`` is summed over
    executions.
    """

    requests: int = 0
    failed: int = 0
    rows: int = 0
    executions: int = 0
    total_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    busy_ns: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, before: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


@dataclass(frozen=True)
class StepFigures:
    """Figures of one step under one load.

    ``queue_ms`` to ``output_ms`` are means per request. ``busy`` is the share of time in which its instances ran,
    ``execution_ms`` the mean of an execution. ``cpu_ms`` is the CPU time per row, None for a model without a stub.
    """

    requests_per_execution: float
    rows_per_execution: float
    queue_ms: float
    input_ms: float
    infer_ms: float
    output_ms: float
    execution_ms: float
    busy: float
    cpu_ms: float | None = None

    @property
    def total_ms(self) -> float:
        """Mean milliseconds of a request in this step, including the queue."""
        return self.queue_ms + self.input_ms + self.infer_ms + self.output_ms


def read_counters(server: Server) -> dict[str, Counters]:
    """Read the counters of every model of a server, summed over versions.

    Raises:
        ServerError: the server does not answer.
    """
    import grpc  # type: ignore[import-untyped]
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    with grpc.insecure_channel(server.grpc_url, [("grpc.enable_http_proxy", 0)]) as channel:
        key = (("triton-grpc-protocol-admin-key", server.admin_key),)
        try:
            reply = GRPCInferenceServiceStub(channel).ModelStatistics(pb.ModelStatisticsRequest(), 60, metadata=key)
        except grpc.RpcError as error:
            raise ServerError(f"Triton gave no statistics: {error.details()}.", server.cause()) from None
    found: dict[str, Counters] = {}
    for entry in reply.model_stats:
        found[entry.name] = _counters(entry) + found.get(entry.name, Counters())
    return found


def _counters(entry: Any) -> Counters:
    stats = entry.inference_stats
    executed = [(batch.compute_input, batch.compute_infer, batch.compute_output) for batch in entry.batch_stats]
    return Counters(
        requests=stats.success.count,
        failed=stats.fail.count,
        rows=entry.inference_count,
        executions=entry.execution_count,
        total_ns=stats.success.ns,
        queue_ns=stats.queue.ns,
        input_ns=stats.compute_input.ns,
        infer_ns=stats.compute_infer.ns,
        output_ns=stats.compute_output.ns,
        busy_ns=sum(part.ns for parts in executed for part in parts),
    )


def summarise_step(spent: Counters, seconds: float, instances: int, cpu_seconds: float | None) -> StepFigures:
    """Compute the figures of a step whose counters grew by ``spent`` within ``seconds``."""
    executions, scale = max(1, spent.executions), 1 / max(1, spent.requests) / _NS_PER_MS
    return StepFigures(
        requests_per_execution=spent.requests / executions,
        rows_per_execution=spent.rows / executions,
        queue_ms=spent.queue_ns * scale,
        input_ms=spent.input_ns * scale,
        infer_ms=spent.infer_ns * scale,
        output_ms=spent.output_ns * scale,
        execution_ms=spent.busy_ns / executions / _NS_PER_MS,
        busy=spent.busy_ns / 1e9 / (seconds * max(1, instances)),
        cpu_ms=None if cpu_seconds is None else 1000 * cpu_seconds / max(1, spent.rows),
    )
