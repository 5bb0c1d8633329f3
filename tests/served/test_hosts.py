"""The server, the client and this process give the same answers; to every text in `make verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shoal.clients.client.client import Client
from shoal.clients.local import Pipeline, load
from shoal.kit.component.spec import Array
from shoal.serving.server.launch import Server
from tests.conftest import Record, Scale
from tests.support.readings import batches

OUTPUTS = ("SCORE", "BERT_SCORE", "FOREST_SCORE")


def joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in OUTPUTS}


def largest_difference(some: Mapping[str, Array], others: Mapping[str, Array]) -> float:
    return max(float(np.abs(some[name] - others[name]).max()) for name in OUTPUTS)


@pytest.mark.parametrize("size", [1, 7])
def test_the_three_hosts_agree_to_the_last_bit(
    size: int, client: Client, pipeline: Pipeline, repository: Path, texts: list[str], scale: Scale, record: Record
) -> None:
    client_side = load(repository / "ensemble_all", remote=client)
    sample = texts[: scale(21, 301)]
    for batch in batches(sample, size):
        here = pipeline(excerpt=batch)
        for elsewhere in (client.infer("ensemble_all", excerpt=batch), client_side(excerpt=batch)):
            assert all(np.array_equal(here[name], elsewhere[name]) for name in OUTPUTS)
    record(f"hosts are bit-equal, {client.protocol}, batch {size}", texts=len(sample), differing=0)


@pytest.fixture(scope="module")
def here(pipeline: Pipeline, texts: list[str], scale: Scale) -> tuple[list[str], dict[str, Array]]:
    """A sample (or all) of the texts, and what this process says of them."""
    sample = texts[: scale(48, len(texts))]
    return sample, joined([pipeline(excerpt=batch) for batch in batches(sample, 32)])


def test_served_equals_in_process_on_every_text_in_order(
    server: Server, here: tuple[list[str], dict[str, Array]], record: Record
) -> None:
    sample, expected = here
    with Client(server.grpc_url) as grpc, Client(server.http_url, protocol="http") as http:
        for client, size in ((grpc, 1), (http, 7), (grpc, 64)):
            served = joined([client.infer("ensemble_all", excerpt=batch) for batch in batches(sample, size)])
            difference = largest_difference(served, expected)
            record(f"served = in process, {client.protocol}, batch {size}", texts=len(sample), max_diff=difference)
            assert difference <= 1e-5


def test_concurrent_callers_with_distinct_texts_never_mix(
    server: Server, here: tuple[list[str], dict[str, Array]], record: Record
) -> None:
    sample, expected = here
    with Client(server.grpc_url) as client, ThreadPoolExecutor(16) as callers:
        served = joined(list(callers.map(lambda text: client.infer("ensemble_all", excerpt=[text]), sample)))
    difference = largest_difference(served, expected)
    record("served = in process, 16 concurrent callers", texts=len(sample), max_diff=difference)
    assert difference <= 1e-5
