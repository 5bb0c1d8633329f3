"""Streams of OpenAI's API for long: the memory of the service stays where it is."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.system.processes import find_process
from tests.support.apis import CHATS, chat, open_stream
from tests.support.service import Service, arrive

pytestmark = pytest.mark.verify

AT_ONCE = 12  # fewer than the engine's slots
NOISE_MIB = 6.0  # by which the allocator's memory goes up and down


def test_an_hour_of_streams(repository: Path, tmp_path: Path, scale: Any, record: Any) -> None:
    """At 70 % of what they can do; 10 s of it as a sample. Every stream has the whole text, and [DONE].

    The service may use 5 MiB more in an hour. Its memory goes up and down with what is in flight, so the means of two
    thirds are compared, after a first one in which caches fill.
    """
    seconds, counts = scale(10, full=3600), Counter[str]()

    with Service(repository, tmp_path / "log") as service:

        def ask(number: int) -> None:
            body = chat(f"Hello {number % 50}", max_tokens=20, model=CHATS[number % 2], stream=True)
            with closing(open_stream(service, body)) as connection:
                reply = connection.getresponse()
                text = reply.read()
            if reply.status in (429, 503):  # where other work slows the service
                counts["refused"] += 1
                return
            assert reply.status == 200, text
            assert text.endswith(b"data: [DONE]\n\n")
            assert text.count(b'"finish_reason":"length"') + text.count(b'"finish_reason":"stop"') == 1
            counts["answered"] += 1

        begin, number = time.monotonic(), 20 * AT_ONCE
        with ThreadPoolExecutor(AT_ONCE) as callers:
            for _ in callers.map(ask, range(number)):
                pass
        rate = 0.7 * number / (time.monotonic() - begin)
        samples = list[tuple[float, float]]()

        def ask_and_look(index: int) -> None:
            ask(index)
            if (process := find_process(service.process.pid)) is not None:
                samples.append((time.monotonic(), process.resident_bytes / 2**20))

        arrive(ask_and_look, rate=rate, seconds=seconds, most_callers=64)
    times, sizes = np.array(sorted(samples)).T
    third = (times[-1] - times[0]) / 3
    second, last = (sizes[(times > times[0] + at * third) & (times <= times[0] + (at + 1) * third)] for at in (1, 2))
    growth = float(last.mean() - second.mean())
    record(
        "openai_soak", seconds=seconds, rate=round(rate, 1), **counts, growth_mib=round(growth, 2),
        mib=[round(float(size), 1) for size in (sizes[0], second.mean(), last.mean(), sizes.max())],
    )  # fmt: skip
    assert counts["answered"] > 9 * counts["refused"], counts
    assert growth < 5 * third / 3600 + NOISE_MIB
