"""For tests of bulk work: a repository that is fast enough for many rows, and rows."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.composition.compose import compose
from shoal.clients.bulk.files import infer_to_file
from shoal.clients.bulk.inputs import make_feed
from shoal.clients.bulk.output_formats import make_format
from shoal.clients.bulk.parquet import ParquetOrigin
from shoal.clients.bulk.scoring import Endpoint, Summary
from shoal.clients.bulk.tables import scan_table
from shoal.clients.local import Pipeline, load

MODEL_FOLDERS = Path(__file__).parent / "model_folders"
WORDS = ("the", "of", "and", "a", "to", "in", "is", "it", "was", "cat", "dog", "house", "because", "whale", "ship")


class Stopped(Exception):  # noqa: N818
    """Exception that ends a run in the middle."""


def run(model: Endpoint, source: Path, output: Path, stop_after: int | None = None, **options: Any) -> Summary:
    """Score a file, as the command does; ``Stopped`` after some rows."""

    def on_rows(done: int, fraction: float | None) -> None:
        assert fraction is None or 0 <= fraction <= 1
        if stop_after is not None and done >= stop_after:
            raise Stopped

    with scan_table(source) as table:
        feed = make_feed(model.spec, table)
        form = make_format(output.suffix, table, model.spec, ParquetOrigin.of_file(source))
        settings = {"model": model.spec.name, **options.pop("settings", {})}
        return infer_to_file(table, model, feed, form, output, settings=settings, on_rows=on_rows, **options)


@pytest.fixture(scope="session")
def forest(tmp_path_factory: pytest.TempPathFactory, artifacts: Path) -> Path:
    """A repository that scores by the forest alone."""
    return compose(
        "forest", tmp_path_factory.mktemp("forest") / "repository", artifacts=artifacts, projects=[MODEL_FOLDERS]
    )


@pytest.fixture(scope="session")
def scorer(forest: Path) -> Iterator[Pipeline]:
    """The repository's pipeline in this process."""
    loaded = load(forest / "forest")
    yield loaded
    loaded.close()


def write_texts(path: Path, num_rows: int) -> Path:
    """A CSV file of short texts, a number beside each."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = ([n, " ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + "."] for n in range(num_rows))
        csv.writer(file).writerows([["id", "text"]])
        csv.writer(file).writerows(rows)
    return path


def infer_arguments(forest: Path, source: Path, output: Path) -> list[str]:
    return ["infer", "--local", "--repository", str(forest), "-i", str(source), "-o", str(output)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return list(parquet.read_table(path).to_pylist())
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file]
