"""The notebook runs from top to bottom, and is kept without what it printed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.once import ROOT

NOTEBOOK = ROOT / "examples" / "readability.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert {str(cell["outputs"]) for cell in cells if cell["cell_type"] == "code"} == {"[]"}
    assert {cell["execution_count"] for cell in cells if cell["cell_type"] == "code"} == {None}


# Of the notebook's own machinery: sockets and event loops that it leaves to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::pytest.PytestWarning")
def test_it_runs_from_top_to_bottom(artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    (tmp_path / "examples").mkdir()
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "artifacts").symlink_to(artifacts)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path / "examples"}}).execute()
    answers = {cell["id"]: shown(cell["outputs"]) for cell in notebook.cells if cell["cell_type"] == "code"}
    assert any("image/svg+xml" in str(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    text = "\n".join(answers.values())
    assert "BERT_WEIGHT[1] is 1.5; it must lie between 0 and 1." in text
    assert "True" in answers[next(reversed(answers))] or "False" in answers[next(reversed(answers))]


def shown(outputs: list[Any]) -> str:
    """The text of a cell's outputs."""
    return "\n".join(str(output.get("data", {}).get("text/plain", output.get("text", ""))) for output in outputs)
