"""Ledger of the copies between host and device in a model's process, its totals as Triton metrics, and a heartbeat.

``Device.put`` and ``Device.fetch`` (in ``tensors.py``) record their copies in the ledger, by tensor name (an *edge*).
Wrappers of libraries that copy a few bytes themselves, such as libcudf, record these copies, too.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

UP, DOWN, ACROSS = "up", "down", "across"  # host to device, device to host, device to device

# Edges that are not tensors of the model.
SETUP = "(setup)"  # word lists and a rehearsal, once at the start
EXACT = "(exact rows)"  # ids, mask and features of rows that fall back to the host's tokenizer
CONTROL = "(control)"  # a few bytes per batch that decide sizes on the host

BATCHES, ROWS, EXACT_ROWS = "batches", "rows", "exact_rows"
DRAFTED, ACCEPTED = "drafted_tokens", "accepted_tokens"

# Among Triton's own metrics, under ``:8002/metrics``: counters with "_total" at the end, else gauges. Events are called
# "shoal_...", but for those with a colon, which have vLLM's names.
INFO = "shoal_component_info"
COPIES, BYTES, SECONDS = "shoal_copies_total", "shoal_copied_bytes_total", "shoal_copy_seconds_total"
_DESCRIPTIONS = {
    COPIES: "Copies between host and device, by edge",
    BYTES: "Bytes copied between host and device, by edge",
    SECONDS: "Host time in copies between host and device, seconds, by edge",
    "shoal_batches_total": "Batches that a component has run",
    "shoal_rows_total": "Rows of the batches that a component has run",
    "shoal_exact_rows_total": "Rows tokenized on the host, where the device's tokenizer would differ",
    "shoal_drafted_tokens_total": "Tokens that speculative decoding has guessed",
    "shoal_accepted_tokens_total": "Guessed tokens that the model confirmed",
    INFO: "1, with what a component found out when it was loaded",
}
_THEIRS = "As vLLM counts it, for the models of this process"

_log = logging.getLogger("shoal")


class CopyEdge(NamedTuple):
    """Name and direction of copies. The name is a tensor of the model, or ``SETUP``, ``EXACT`` or ``CONTROL``."""

    name: str
    direction: str


@dataclass(frozen=True)
class CopyTotals:
    """Totals of an edge's copies. ``seconds`` is the host's time in the calls; an upload may outlast its call."""

    copies: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: CopyTotals) -> CopyTotals:
        return CopyTotals(self.copies + other.copies, self.num_bytes + other.num_bytes, self.seconds + other.seconds)

    def __sub__(self, other: CopyTotals) -> CopyTotals:
        return CopyTotals(self.copies - other.copies, self.num_bytes - other.num_bytes, self.seconds - other.seconds)


class Ledger:
    """Running totals of the copies and events of one model instance. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic: dict[CopyEdge, CopyTotals] = {}
        self._events: dict[str, int] = {}
        self.levels: dict[str, float] = {}  # gauges, by the name of the metric
        self._findings: dict[str, str] = {}

    def record(self, edge: str, direction: str, num_bytes: int, seconds: float = 0.0, *, copies: int = 1) -> None:
        """Add copies to the totals of ``edge``; ``num_bytes`` and ``seconds`` are for all ``copies`` together."""
        key, added = CopyEdge(edge, direction), CopyTotals(copies, num_bytes, seconds)
        with self._lock:
            self._traffic[key] = self._traffic.get(key, CopyTotals()) + added

    def count(self, event: str, number: int = 1) -> None:
        """Add ``number`` to the counter of ``event``, such as ``BATCHES`` or ``ROWS``."""
        with self._lock:
            self._events[event] = self._events.get(event, 0) + number

    def end_setup(self) -> None:
        """Move the totals of all copies so far to the edge ``SETUP``, and reset the event counters."""
        with self._lock:
            before, self._traffic, self._events = self._traffic, {}, {}
            for edge, traffic in before.items():
                key = CopyEdge(SETUP, edge.direction)
                self._traffic[key] = self._traffic.get(key, CopyTotals()) + traffic

    def tell(self, **findings: str) -> None:
        """Keep what the component found out at its load, such as ``batching="static"``: labels of a metric."""
        with self._lock:
            self._findings.update(findings)

    @property
    def findings(self) -> Mapping[str, str]:
        """Snapshot of what the component found out."""
        with self._lock:
            return dict(self._findings)

    @property
    def traffic(self) -> Mapping[CopyEdge, CopyTotals]:
        """Snapshot of the totals of the copies, by edge."""
        with self._lock:
            return dict(self._traffic)

    @property
    def events(self) -> Mapping[str, int]:
        """Snapshot of the event counters."""
        with self._lock:
            return dict(self._events)


class Metrics:
    """Thread that publishes a ledger's totals as Triton metrics, every ``seconds`` seconds.

    An increment of a metric is a round trip to the server of about 0.1 ms, so a thread makes it, not the request.
    Labels contain the process id: if instances had counters with equal labels, Triton would delete the counter of all
    when the first instance ends. ``family`` is ``pb_utils.MetricFamily``.
    """

    def __init__(self, ledger: Ledger, family: Any, model: str, instance: str, *, seconds: float = 1.0) -> None:
        self._ledger, self._model, self._seconds = ledger, model, seconds
        self._labels = {"model": model, "instance": f"{instance}-{os.getpid()}"}
        self._family = family
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, ...], Any] = {}
        self._told: dict[tuple[str, ...], float] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._has_ended.wait(self._seconds):
            try:
                self.publish()
            except Exception:  # a server without metrics: requests are answered all the same
                _log.exception("model %s publishes no metrics", self._model)
                return

    def publish(self) -> None:
        """Raise Triton's counters to the ledger's totals, and tell what the component found out."""
        findings = self._ledger.findings
        for edge, traffic in self._ledger.traffic.items():
            for name, value in _amounts(traffic).items():
                self._raise_to((name, *edge), value)
        for event, number in self._ledger.events.items():
            self._raise_to((f"{event if ':' in event else f'shoal_{event}'}_total",), number)
        for name, value in dict(self._ledger.levels).items():
            self._find_metric((name,)).set(value)
        if findings and (INFO,) not in self._metrics:
            self._find_metric((INFO,), **findings).increment(1)

    def _raise_to(self, key: tuple[str, ...], value: float) -> None:
        added = value - self._told.get(key, 0)
        if added <= 0:
            return
        self._find_metric(key).increment(added)
        self._told[key] = value

    def _find_metric(self, key: tuple[str, ...], **more: str) -> Any:
        """Return the metric of a name and an edge, made at the first time; ``more`` are further labels of it."""
        name, *edge = key
        if name not in self._families:
            kind = self._family.COUNTER if name.endswith("_total") else self._family.GAUGE
            self._families[name] = self._family(name=name, description=_DESCRIPTIONS.get(name, _THEIRS), kind=kind)
        if key not in self._metrics:
            labels = {**self._labels, **dict(zip(("edge", "direction"), edge, strict=False)), **more}
            self._metrics[key] = self._families[name].Metric(labels=labels)
        return self._metrics[key]

    def close(self) -> None:
        """Stop the thread without a last update: the model ends, and Triton deletes its counters."""
        self._has_ended.set()
        self._thread.join()


def _amounts(traffic: CopyTotals) -> dict[str, float]:
    return {COPIES: traffic.copies, BYTES: traffic.num_bytes, SECONDS: traffic.seconds}


# --- heartbeat ---------------------------------------------------------------------------------------------------

# From outside, a process that hangs looks like an idle one. So each process writes when its current batch began.

VARIABLE = "SHOAL_BEACONS"  # names the folder, in the server's environment
_SINCE = struct.Struct("<d")  # start of the current batch, seconds on the machine's monotonic clock; 0 while idle


class Beacon:
    """Writer of this process's heartbeat: the start time of its current batch.

    The file is named by process id, in the folder that the environment variable ``SHOAL_BEACONS`` names.
    """

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        self._file = (Path(folder) / str(os.getpid())).open("wb", buffering=0) if folder else None
        self.close_batch()

    def open_batch(self) -> None:
        """Record that a batch begins."""
        self._tell(time.monotonic())

    def close_batch(self) -> None:
        """Record that the current batch is answered."""
        self._tell(0.0)

    def _tell(self, since: float) -> None:
        if self._file is not None:
            os.pwrite(self._file.fileno(), _SINCE.pack(since), 0)

    def close(self) -> None:
        """Close the file; called when the model is unloaded."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_beacon(folder: Path, pid: int) -> float | None:
    """Return the start of a process's batch, in s of the monotonic clock; 0 while idle, None without a heartbeat."""
    try:
        content = (folder / str(pid)).read_bytes()
    except OSError:
        return None
    return float(_SINCE.unpack(content)[0]) if len(content) == _SINCE.size else None
