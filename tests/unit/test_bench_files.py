"""Files that a benchmark writes: folders, a second run, models of other projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.authoring.repository.loading import component_class
from shoal.errors import ArtifactError, SetupError
from shoal.lab.bench.record import BenchSettings
from shoal.lab.bench.run import Loads, write
from tests.support.bench import measure_rows, write_repository


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the record of a benchmark of a real server."""
    folder = tmp_path_factory.mktemp("bench")
    repository = write_repository(folder / "repository", seconds="0")
    settings = BenchSettings(seconds=0.2, warm_seconds=0.1, repeats=2)
    return measure_rows(repository, settings, Loads((1,), (2,)))


def test_a_second_run_of_a_day_leaves_the_first_alone(record: dict[str, Any], tmp_path: Path) -> None:
    first, _ = write(record, tmp_path)
    again, _ = write({**record, "notes": ["Another."]}, tmp_path)
    assert [path.name for path in first[:2]] == [f"bench-{record['date']}{end}" for end in (".json", ".md")]
    assert [path.name for path in again[:2]] == [f"bench-{record['date']}-2{end}" for end in (".json", ".md")]
    assert json.loads(first[0].read_text(encoding="utf-8"))["notes"] == record["notes"]


def test_a_folder_that_cannot_be_written_is_found_out_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(
        SetupError, match=r"file/out cannot be written: Not a directory\. Name another folder: --out DIR"
    ):
        CliRunner().invoke(
            cli.app, ["bench", str(tmp_path), "--out", str(tmp_path / "file" / "out")], catch_exceptions=False
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import triton_python_backend_utils", " that loads in this process: No module named 'triton_python_back"),
        ("class TritonPythonModel: ...", r"\. Derive a class from shoal's Component"),
        ("", r"\. Derive a class from shoal's Component"),
    ],
)
def test_a_model_that_is_not_a_component(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tokenizer" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArtifactError, match=f"^tokenizer/1/model.py is not a shoal component{reason}"):
        component_class(path)
