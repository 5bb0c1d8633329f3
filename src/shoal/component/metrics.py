"""A ledger as counters among Triton's own metrics, under ``:8002/metrics``."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from shoal.component.ledger import Ledger, Traffic
from shoal.component.tensors import metric_family

COPIES, BYTES, SECONDS = "shoal_copies_total", "shoal_copied_bytes_total", "shoal_copy_seconds_total"
_DESCRIPTIONS = {
    COPIES: "Copies between host and device, by edge",
    BYTES: "Bytes of these copies",
    SECONDS: "The host's time in these copies",
    "shoal_batches_total": "Batches that a component has run",
    "shoal_rows_total": "Rows of these batches",
    "shoal_exact_rows_total": "Rows tokenized on the host, where the device's tokenizer would differ",
}

_log = logging.getLogger("shoal")


class Metrics:
    """Brings Triton's counters up to a ledger's totals, once a second while there is work.

    An increment is a round trip to the server of about a tenth of a millisecond, so requests do not wait for it.
    Counters are this process's own: Triton deletes equal ones of several instances with the first that ends.
    """

    def __init__(self, ledger: Ledger, model: str, instance: str, *, seconds: float = 1.0) -> None:
        self._ledger, self._model, self._seconds = ledger, model, seconds
        self._labels = {"model": model, "instance": f"{instance}-{os.getpid()}"}
        self._family = metric_family()
        self._families: dict[str, Any] = {}
        self._counters: dict[tuple[str, ...], Any] = {}
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
        """Tell Triton what is new."""
        for edge, traffic in self._ledger.traffic.items():
            for name, value in _amounts(traffic).items():
                self._raise_to((name, *edge), value)
        for event, number in self._ledger.events.items():
            self._raise_to((f"shoal_{event}_total",), number)

    def _raise_to(self, key: tuple[str, ...], value: float) -> None:
        added = value - self._told.get(key, 0)
        if added <= 0:
            return
        if key not in self._counters:
            self._counters[key] = self._make_counter(*key)
        self._counters[key].increment(added)
        self._told[key] = value

    def _make_counter(self, name: str, *edge: str) -> Any:
        if name not in self._families:
            self._families[name] = self._family(name=name, description=_DESCRIPTIONS[name], kind=self._family.COUNTER)
        labels = {**self._labels, **dict(zip(("edge", "direction"), edge, strict=False))}
        return self._families[name].Metric(labels=labels)

    def close(self) -> None:
        """Stop; Triton drops this process's counters now, so nothing is left to tell."""
        self._has_ended.set()
        self._thread.join()


def _amounts(traffic: Traffic) -> dict[str, float]:
    return {COPIES: traffic.copies, BYTES: traffic.num_bytes, SECONDS: traffic.seconds}
