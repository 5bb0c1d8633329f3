"""Quickstart: train, compose, serve, score passages, stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.authoring.composition.compose import compose
from shoal.authoring.repository.plan import Plan
from shoal.clients.client.client import Client
from shoal.kit.encoders.packaged import SMALL_ENCODER
from shoal.readability.corpus import find_corpus, read_passages
from shoal.readability.train import PAGE, PRESETS, Preset, split, train
from shoal.serving.server.launch import Server, serve
from shoal.serving.server.runtime import find_runtime
from shoal.system.paths import check_path_supported
from shoal.system.progress import OnProgress

ENSEMBLE = "ensemble_all"
NUM_SCORED = 8


@dataclass(frozen=True)
class Score:
    """Passage with the ensemble's scores; higher is easier to read."""

    text: str
    bert: float
    forest: float
    blend: float


@dataclass(frozen=True)
class Result:
    """Scores and output paths of a quickstart."""

    scores: tuple[Score, ...]
    artifacts: Path
    repository: Path
    report: Path
    rmse: dict[str, float]
    is_demonstration: bool


def run(
    out: Path,
    *,
    data: Path | None = None,
    encoder: str = SMALL_ENCODER,
    preset: Preset | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Result:
    """Train on ``data`` (else the corpus of SHOAL_DATA_DIR, else shoal's own passages), serve, score a few passages.

    The scored passages are shoal's own; the models were not trained on them.
    """
    check_path_supported(out.resolve())  # report what would stop the server before minutes of training
    find_runtime()
    preset = preset or PRESETS["quick"]
    corpus = find_corpus(data)
    report = train(corpus, out / "artifacts", encoder=encoder, preset=preset, is_fresh=True, on_progress=on_progress)
    on_progress("compose the repository", 0, 1)
    repository = compose(ENSEMBLE, out / "repository", artifacts=out / "artifacts", plan=Plan())
    on_progress("compose the repository", 1, 1)
    passages = corpus.take(split(corpus, preset, 0)[1]) if corpus.is_demonstration else read_passages()
    on_progress("start Triton", 0, 1)
    with serve(repository) as server:
        on_progress("start Triton", 1, 1)
        scores = _score(server, _spread(passages.texts, passages.targets.tolist()))
    return Result(
        scores=scores,
        artifacts=out / "artifacts",
        repository=repository,
        report=out / "artifacts" / PAGE,
        rmse=report["unseen_rmse"],
        is_demonstration=corpus.is_demonstration,
    )


def _spread(texts: tuple[str, ...], targets: list[float]) -> list[str]:
    """Select a few texts, evenly spaced from the easiest to the hardest."""
    order = sorted(range(len(texts)), key=lambda i: -targets[i])
    step = (len(order) - 1) / (NUM_SCORED - 1)
    return [texts[order[round(k * step)]] for k in range(NUM_SCORED)]


def _score(server: Server, texts: list[str]) -> tuple[Score, ...]:
    with Client(server.grpc_url) as client:
        answer = client.infer(ENSEMBLE, excerpt=texts)
    columns = (answer[name][:, 0].tolist() for name in ("BERT_SCORE", "FOREST_SCORE", "SCORE"))
    return tuple(Score(*row) for row in zip(texts, *columns, strict=True))
