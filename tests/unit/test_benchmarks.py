"""The pure pieces of the benchmarks: what they compare with gives the same answers, what they compute is right."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.errors import InputError, SetupError
from shoal.readability.corpus import Corpus
from shoal.readability.forest import fit_bundle
from shoal.readability.reader import Features
from shoal.text.words import TokenCoder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark's module by its name, as the scripts beside it do."""
    for folder in (BENCHMARKS, BENCHMARKS / "readability"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module


def test_features_in_plain_python_are_shoals(load: Any, passages: Corpus) -> None:
    bundle = fit_bundle(passages.texts, vocabulary_sha256="0", is_lowercase=True, max_length=256)
    texts = [*passages.texts, "", "!? …", "No end", "One. Two... THREE?! naïve café 漢字 e\u0301"]
    found = load("recipe").PlainFeatures(json.loads(bundle.dumps()))(texts)
    features = Features(bundle)
    expected = features(TokenCoder(features.lexicon)(texts))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("num_tokens", "layers", "hidden", "expected"),
    [
        (256, 24, 1024, 161_061_273_600),  # BERT-large, padded
        (128, 24, 1024, 78_920_024_064),
        (1, 1, 1, 28),
    ],
)
def test_flop_of_an_encoder(load: Any, num_tokens: int, layers: int, hidden: int, expected: int) -> None:
    assert load("flops").encoder_flop(num_tokens, layers=layers, hidden=hidden) == expected


def make_round(ours: float) -> dict[str, Any]:
    return {
        "matrix_tflop_per_s": {"4096x4096x4096": 0.2},
        "batch": {"bare": {"rows_per_s": 10.0}, "ours": {"rows_per_s": ours}, "recipe": {"rows_per_s": 5.0}},
        "steps": {
            "preprocess_ms_a_sample": 0.2, "encoder_ms_a_sample": 99.0, "share_of_all_but_the_encoder": 0.01,
            "encoder_tflop_per_s": 0.15,
        },
        "callers": {
            "ours": {"rows_per_s": ours, "p50_ms": 100.0, "p99_ms": 200.0, "requests": 160},
            "pytriton": {"rows_per_s": 6.0, "p50_ms": 150.0, "p99_ms": 300.0, "requests": 96},
        },
        "one": {
            "ours": {"rows_per_s": 9.0, "p50_ms": 110.0, "p99_ms": 130.0, "requests": 9},
            "recipe": {"rows_per_s": 5.0, "p50_ms": 220.0, "p99_ms": 230.0, "requests": 5},
        },
    }  # fmt: skip


def test_ratios_are_medians_of_rounds_and_of_who_took_part(load: Any) -> None:
    found = load("summary").ratios([make_round(8.0), make_round(9.0), make_round(3.0)])
    assert {(r["load"], r["to"]) for r in found} == {
        ("batch", "bare"), ("batch", "recipe"), ("callers", "pytriton"), ("one", "recipe"),
    }  # fmt: skip
    assert found[0] == {
        "load": "batch", "figure": "rows_per_s", "of": "ours", "to": "bare", "better": "more", "min": 0.3,
        "median": 0.8, "max": 0.9,
    }  # fmt: skip


def test_summary_of_a_record(load: Any) -> None:
    summary, rounds = load("summary"), [make_round(8.0), make_round(9.0), make_round(3.0)]
    record = {
        "date": "2026-11-21",
        "machine": {"cpu": "A processor", "cores": 2, "flags": "avx512f avx2"},
        "corpus": "a corpus",
        "encoder": {"name": "large", "layers": 2, "hidden": 1024, "weights": "random weights", "dtype": "fp32"},
        "settings": {"batch": 64, "callers": 16},
        "tokens": {"true_tokens_a_sample": 220.5, "padding_share": {"to 256": 0.14, "as shoal computes": None}},
        "rounds": rounds,
        "medians": summary.medians(rounds),
        "pooled": {"callers": {"ours": {"p50_ms": 101.0, "p99_ms": 202.0, "p99_over_p50": 2.0, "requests": 480}}},
        "ratios": summary.ratios(rounds),
        "checks": {"ours_to_recipe": 1e-6},
    }
    lines = summary.to_markdown(record).splitlines()
    assert lines[0] == "# Readability, large encoder, 2026-11-21"
    assert "| requests of 64 texts, in turns: shoal, served | 8 |  |  |  |  |" in lines
    assert "| 16 callers of single texts: shoal, served | 8 | 101 | 202 | 2 | 480 |" in lines
    assert "| batch, rows_per_s: shoal, served / recipe | 1.6 | 0.6 | 1.8 | more |" in lines
    assert "| encoder / best matrix rate | 0.75 |" in lines


def test_output_of_perf_analyzer(load: Any, tmp_path: Path) -> None:
    analyzer = load("perf_analyzer")
    printed = """
    Throughput: 194.6 infer/sec
    p50 latency: 4030 usec
    p90 latency: 5560 usec
    p99 latency: 18500 usec
Inferences/Second vs. Client Average Batch Latency
Concurrency: 1, throughput: 193.4 infer/sec, latency 5120 usec
"""
    assert analyzer.read_output(printed) == (193.4, 4.03, 18.5)
    with pytest.raises(SetupError, match=r"perf_analyzer gave no figure: error: failed to .*model\."):
        analyzer.read_output("", "\nerror: failed to find the model\n")
    with pytest.raises(InputError, match=r"There is no .*nowhere"):
        analyzer.PerfAnalyzer(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no program", encoding="utf-8")
    with pytest.raises(SetupError, match="does not start: Permission denied"):
        analyzer.PerfAnalyzer(tmp_path / "text")


def test_random_arrivals(load: Any) -> None:
    """One caller, and twice the work that it can do: a late arrival waits long, and the wait counts."""
    open_loop = load("arrivals").open_loop

    def sleep(number: int) -> int:
        if number == 100:
            raise ValueError("the last")
        time.sleep(0.02)
        return 3

    crowded = open_loop(sleep, rate=100, seconds=0.5, seed=1, most_callers=1)
    assert crowded.percentile(90) > 5 * 0.02
    assert crowded.rows_per_second <= 3 / 0.02
    again = open_loop(lambda _: 1, rate=100, seconds=0.5, seed=1, most_callers=4)
    assert len(again.latencies) == len(crowded.latencies)  # the same arrivals
    assert again.percentile(50) < crowded.percentile(50)
    assert len(open_loop(lambda _: 1, rate=1, seconds=0.001, seed=1, most_callers=1).latencies) == 1
    with pytest.raises(ValueError, match="the last"):
        open_loop(sleep, rate=1000, seconds=60, seed=0, most_callers=8)
