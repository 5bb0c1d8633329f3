"""Clock for the seconds of each training stage, and the peak memory; both continue after an interruption."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shoal.readability.batches import OnStep
from shoal.readability.work import write_whole
from shoal.system.progress import OnProgress

KEPT_EVERY = 10.0  # seconds between writes; an interruption loses at most these


@dataclass
class Clock:
    """Seconds per stage, saved in ``path``; each stage is also reported to ``on_progress``.

    After an interruption, a stage's time continues from the saved value.
    """

    on_progress: OnProgress
    path: Path
    seconds: dict[str, float] = field(default_factory=dict)
    _peak_before: float = 0.0
    _kept_at: float = 0.0

    def __post_init__(self) -> None:
        if self.path.is_file():
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            self.seconds, self._peak_before = kept["seconds"], kept["peak_gib"]

    @property
    def peak_gib(self) -> float:
        """Peak memory in GiB, of this process or, if higher, of an earlier process of the same interrupted training."""
        return max(self._peak_before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)

    @contextmanager
    def stage(self, name: str) -> Iterator[OnStep]:
        """Measure the seconds of the stage that runs inside the context; it reports steps to the yielded function."""
        start, before = time.perf_counter(), self.seconds.get(name, 0.0)

        def account() -> None:
            self.seconds[name] = round(before + time.perf_counter() - start, 2)
            self._kept_at = time.perf_counter()
            write_whole(self.path, json.dumps({"seconds": self.seconds, "peak_gib": self.peak_gib}))

        def on_step(done: int, total: int) -> None:
            self.on_progress(name, done, total)
            if time.perf_counter() - self._kept_at >= KEPT_EVERY:
                account()

        self.on_progress(name, 0, 1)
        yield on_step
        account()
        self.on_progress(name, 1, 1)
