"""Calls between models under load, for long: 16 callers of ``llm_bls``, and 16 of a model that answers once.

Both send requests from many threads of one process (``.exec()``), which other releases do not survive (server#8882).
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal import Client
from shoal.authoring.composition.compose import compose
from shoal.clients.llm.client import Llm
from shoal.lab.tiny_llm import make_tiny
from shoal.serving.server.launch import serve
from tests.conftest import Record, Scale
from tests.support.once import ROOT
from tests.support.trtllm import FOLDERS, PROMPTS, SWAP

CALLERS, NEW = 16, 6


def test_calls_last(tmp_path: Path, scale: Scale, record: Record) -> None:
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name)
        path = tmp_path / name / "config.pbtxt"
        path.write_text(path.read_text(encoding="utf-8").replace("decoupled: true", "decoupled: false"), "utf-8")
    weights = make_tiny(tmp_path / "weights")
    repository = compose(
        ["llm_bls", "tensorrt_llm_bls"], tmp_path / "r", weights=weights, swap=SWAP, projects=[tmp_path]
    )
    seconds, counts = scale(5, 600), Counter[str]()
    with serve(repository) as server, Client(server.grpc_url) as client:
        llm = Llm(client, "llm_bls")

        def in_pieces(prompt: str) -> str:
            return "".join(piece.text for piece in llm.stream(prompt, max_tokens=NEW, temperature=0))

        def once(prompt: str) -> str:
            answer = client.infer("tensorrt_llm_bls", {"text_input": [prompt], "max_tokens": [NEW]})
            return str(answer["text_output"].item().decode())

        ways = {"llm_bls": in_pieces, "tensorrt_llm_bls": once}
        expected = {prompt: in_pieces(prompt) for prompt in PROMPTS}
        begin = time.monotonic()

        def call(number: int) -> None:
            model = [*ways][number % 2]
            turn = number
            while time.monotonic() < begin + seconds:
                prompt = PROMPTS[turn % len(PROMPTS)]
                assert ways[model](prompt) == expected[prompt]
                counts[model] += 1
                turn += 1

        with ThreadPoolExecutor(2 * CALLERS) as pool:
            callers = [pool.submit(call, number) for number in range(2 * CALLERS)]
            time.sleep(seconds / 3)
            early = used_mib()
            for caller in callers:
                caller.result()
            late = used_mib()
    assert min(counts.values()) > CALLERS
    assert 0 < late <= early + 1
    record("calls between models, 16 callers of each", seconds=seconds, shm_mib=[early, late], **counts)


def used_mib() -> float:
    """MiB in /dev/shm of the servers that this process started."""
    return sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").glob(f"shoal_{os.getpid()}_*")) / 2**20
