"""The readability pipeline beside what it can be compared with, side by side in one run on the CPU.

    python benchmarks/readability/run.py --encoder large|small [--layers 24] [--rounds 3] [--turns 4] [--seconds 20]

Ours is ``ensemble_all``, composed by shoal and served by the embedded Triton. Beside it take turns, round by round:

* the bare models in a loop: the same encoder file by the same backend object and the same forest, called in this
  process on tensors that were prepared before: the limit, as long as one batch is computed at a time;
* the recipe as it was published: Hugging Face's tokenizer, features in plain Python, FP32 TorchScript padded to 256
  tokens, scikit-learn's forest, in a loop in this process;
* LitServe (``pip install 'shoal[bench]'``) and PyTriton with what a careful user would put behind them: the same models
  and dtype, batches padded to their longest text, frozen, all cores, batching on, its settings tried before the rounds.

``large`` is BERT-large's geometry with random weights: its scores mean nothing, its times do. ``small`` is MiniLM as
the quick preset trains it. Requests are real texts: the CLEAR corpus's where SHOAL_DATA_DIR names its folder, else
shoal's own, which are few. Callers share the machine with the servers. What it does not show: GPUs, networks, other
servers' settings than those tried, and a p99 finer than the number of requests beside it allows. The record, with
hardware, versions and every round's figures, goes to benchmarks/results/readability-ENCODER-DATE.json; a summary is
printed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the server

import others
import torch
import typer
from checks import compare_dtypes, compare_systems
from prepare import LARGE, SMALL, grow_forest, make_artifacts, say, shuffle
from recipe import Recipe
from rounds import Rounds, System
from summary import medians, ratios, to_markdown
from systems import ENSEMBLE, TIMEOUT, Bare, Ours, Walk

from shoal import Client, compose, serve
from shoal.bench.load import closed_loop
from shoal.errors import ShoalError
from shoal.machine import describe_machine, library_versions
from shoal.readability.corpus import find_corpus
from shoal.repository.placement import Plan

RESULTS = Path(__file__).parents[1] / "results"
LIBRARIES = (
    "numpy", "torch", "transformers", "tokenizers", "scikit-learn", "treelite", "tritonclient", "nvidia-pytriton",
    "litserve",
)  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NUM_CHECKED = 256  # texts


def main(
    encoder: Annotated[str, typer.Option(help="large or small")] = SMALL,
    layers: Annotated[int, typer.Option(help="of the large encoder; fewer for slow machines")] = 24,
    dtype: Annotated[str, typer.Option(help="the plan's: fp32, bf16, auto")] = "auto",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="of load for each figure, at least")] = 20.0,
    tune_seconds: Annotated[float, typer.Option(help="of load for each setting tried; 0 takes the first")] = 10.0,
    batch: Annotated[int, typer.Option(min=1, help="texts a request")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="requests of so many texts, of each, in a round")] = 4,
    callers: Annotated[int, typer.Option(min=1, max=64, help="of single texts, at a time")] = 16,
    artifacts: Annotated[Path | None, typer.Option(help="kept there, and taken from there")] = None,
    results: Annotated[Path, typer.Option(help="the folder of the record")] = RESULTS,
) -> None:
    """Measure and record."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers are stopped on the way out
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="shoal-")))
        record = measure(
            held, folder, (artifacts or folder / "artifacts").resolve(), encoder=encoder, layers=layers, dtype=dtype,
            settings={
                "rounds": rounds, "turns": turns, "seconds": seconds, "tune_seconds": tune_seconds, "batch": batch,
                "callers": callers,
            },
        )  # fmt: skip
    path = results / f"readability-{encoder}-{record['date']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(to_markdown(record))
    print(path)


def measure(
    held: ExitStack, folder: Path, artifacts: Path, *, encoder: str, layers: int, dtype: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """The whole record."""
    corpus = find_corpus()
    say("artifacts")
    geometry = make_artifacts(corpus, artifacts, encoder=encoder, layers=layers)
    walk, batch = Walk(shuffle(corpus)), settings["batch"]
    repository = compose(ENSEMBLE, folder / "repository", artifacts=artifacts, plan=Plan(dtype=dtype))
    say("bare models")
    bare = Bare(repository, walk, batch, geometry)
    served_dtype = bare.dtype()
    say(f"the encoder runs in {served_dtype}")
    forest = grow_forest(corpus, artifacts)
    recipe = Recipe(artifacts, forest=forest.predict)
    user = {"artifacts": str(artifacts), "dtype": served_dtype, "threads": torch.get_num_threads()}
    tuned = {name: tune(name, user, walk, settings) for name in ("litserve", "pytriton") if others.is_installed(name)}

    server = held.enter_context(serve(repository))
    ours = Ours(held.enter_context(Client(server.grpc_url, timeout=TIMEOUT)))
    systems = [System("ours", ours.score)]
    for name, tried in tuned.items():
        other = held.enter_context(others.run(name, {**user, **tried[0]["settings"]}))
        systems.append(
            System(name, lambda texts, score=other.score: [score(text) for text in texts], awake=other.awake)
        )
    turns = Rounds(
        walk, bare, systems, System("recipe", recipe, is_here=True), batch, settings["callers"],
        settings["turns"], settings["seconds"], has_open_loop=encoder == SMALL, dtype=DTYPES[served_dtype],
    )  # fmt: skip
    turns.warm()
    for number in range(settings["rounds"]):
        say(f"round {number + 1} of {settings['rounds']}")
        turns.run()
    say("checks")
    checks: dict[str, Any] = compare_systems(score_a_few(systems, recipe, walk))
    if encoder == SMALL:
        fp32 = compose(ENSEMBLE, folder / "fp32", artifacts=artifacts, plan=Plan(dtype="fp32"))
        checks |= compare_dtypes(fp32, repository, walk.request(0, min(NUM_CHECKED, len(corpus))))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": library_versions(*LIBRARIES),
        "corpus": corpus.name,
        "encoder": {
            "name": encoder, **geometry, "weights": "random weights" if encoder == LARGE else "trained weights",
            "dtype_asked": dtype, "dtype": served_dtype,
        },
        "settings": settings,
        "tokens": bare.tokens(),
        "tried": tuned,
        "configs": {"threads": user["threads"], **{name: tried[0]["settings"] for name, tried in tuned.items()}},
        "rounds": turns.figures,
        "medians": medians(turns.figures),
        "pooled": turns.pooled(),
        "ratios": ratios(turns.figures),
        "checks": checks,
    }  # fmt: skip


def tune(name: str, user: dict[str, Any], walk: Walk, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each setting answered with all callers, the best first."""
    candidates = others.LITSERVE_SETTINGS if name == "litserve" else others.PYTRITON_SETTINGS
    if not settings["tune_seconds"]:
        return [{"settings": candidates[0]}]
    found = []
    for candidate in candidates:
        say(f"{name} with {candidate}")
        with others.run(name, {**user, **candidate}) as other, other.awake():

            def send(index: int, score: others.Score = other.score) -> int:
                score(walk.texts[index % len(walk.texts)])
                return 1

            load = closed_loop(send, callers=settings["callers"], seconds=settings["tune_seconds"])
        p99 = round(1e3 * load.percentile(99), 3)
        found.append({"settings": candidate, "rows_per_s": round(load.rows_per_second, 3), "p99_ms": p99})
    return sorted(found, key=lambda tried: -tried["rows_per_s"])


def score_a_few(systems: list[System], recipe: Recipe, walk: Walk) -> dict[str, Any]:
    """Every system's scores of the same texts."""
    texts = walk.request(0, 32)
    found = {"recipe": recipe(texts)}
    for system in systems:
        with system.awake():
            found[system.name] = system.score(texts)
    return found


if __name__ == "__main__":
    try:
        typer.run(main)
    except ShoalError as error:
        raise SystemExit(f"error: {error}") from None
