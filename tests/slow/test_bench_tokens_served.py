"""`shoal bench` on a running language model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.authoring.composition.compose import compose
from shoal.errors import InputError
from shoal.lab.tiny_llm import make_tiny
from tests.support.commands import Shoal
from tests.support.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("bench")
    repository = compose("llm", folder / "repository", weights=make_tiny(folder / "tiny"))
    with Service(repository, folder / "log") as running:
        yield running


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_prompts_and_answers_have_the_wanted_lengths(
    protocol: str, service: Service, shoal: Shoal, tmp_path: Path
) -> None:
    url = service.grpc if protocol == "grpc" else service.http
    command = ["bench", "--url", url, "--protocol", protocol, "--model", "llm", "--input-tokens", "45"]
    loads = ["--output-tokens", "1,24", "--concurrency", "1,4", "--quick", "--seconds", "0.3"]
    printed = shoal(*command, *loads, "--out", tmp_path)
    assert "tokens in and out; ms to the first token" in printed
    assert "Answers of 24 tokens, 4 streams against 1: " in printed
    (data,) = tmp_path.glob("bench-*.json")
    record = json.loads(data.read_text(encoding="utf-8"))
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".md"]
    assert record["machine"]["cores"] > 0
    assert "shoal" in record["versions"]
    assert len(record["loads"]) == 4
    for load in record["loads"]:
        middle = load["median"]
        assert middle["input_tokens"] == pytest.approx(load["input_tokens"], abs=4)  # one word may be four tokens
        assert middle["output_tokens"] == load["output_tokens"]
        assert 0 < middle["first_p50_ms"] <= middle["first_p90_ms"] <= middle["first_p99_ms"]
        assert middle["first_p50_ms"] <= middle["whole_p50_ms"]
        assert (middle["between_p50_ms"] is None) == (load["output_tokens"] == 1)
        # streams at a time over the time of each is their rate (Little's law)
        rate = 1000 * load["concurrency"] * load["output_tokens"] / middle["whole_p50_ms"]
        assert 0.4 * rate < middle["tokens_per_s"] < 2.5 * rate


def test_refused_arguments(service: Service, shoal: Shoal) -> None:
    asked = ["bench", "--url", service.grpc, "--quick"]
    with pytest.raises(InputError, match="prompt needs none; shoal's own texts can only fill"):
        shoal(*asked, "--model", "prompt")
    with pytest.raises(InputError, match="the model's context is 1024"):
        shoal(*asked, "--model", "llm", "--output-tokens", "1024")
