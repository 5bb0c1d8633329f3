"""The longest silence of an event loop, in processor time of its own thread.

``watch`` runs in the process of the loop. The processor time of one thread does not depend on what else the machine
does, nor on other threads that hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

PERIOD = 0.005
START = "from tests.support.ticks import watch; watch({path!r}); from shoal.cli import main; main()"


def watch(path: str) -> None:
    """Write the seconds of the longest silence of each loop from now on to ``path``; they begin again if it is gone."""
    run_forever, file = asyncio.BaseEventLoop.run_forever, Path(path)

    def run(loop: Any) -> None:
        longest, last = 0.0, 0.0

        def tick() -> None:
            nonlocal longest, last
            now = time.thread_time()
            if not file.exists():
                longest = 0.0
            elif now - last > longest:
                longest = now - last
            file.write_text(str(longest), encoding="ascii")
            last = time.thread_time()
            loop.call_later(PERIOD, tick)

        last = time.thread_time()
        loop.call_soon(tick)
        run_forever(loop)

    asyncio.BaseEventLoop.run_forever = run  # type: ignore[method-assign,assignment]
