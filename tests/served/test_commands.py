"""Commands that ask a server, and the one that does everything."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import ShoalError
from shoal.serving.server.launch import Server
from tests.support.commands import Shoal


def test_infer(shoal: Shoal, server: Server) -> None:
    arguments = ["infer", "The cat sat.", "A [bold] text", "--url", server.grpc_url, "--model", "ensemble_all"]
    table = shoal(*arguments)
    assert "The cat sat." in table
    assert "A [bold] text" in table
    assert all(name in table for name in ("score", "bert_score", "forest_score"))
    rows = json.loads(shoal(*arguments, "--set", "BERT_WEIGHT=1", "--json"))
    assert [row["score"] for row in rows] == [row["bert_score"] for row in rows]
    for fault, message in (
        (("--set", "BERT_WEIGHT"), "--set 'BERT_WEIGHT' is not INPUT=VALUE"),
        (("--set", "W=1"), "There is no input W"),
        (("--set", "BERT_WEIGHT=2"), r"BERT_WEIGHT\[0\] is 2"),
        (("--model", "nope"), "nope"),
        (("--model", "cuml"), "Model cuml takes no text"),
    ):
        with pytest.raises(ShoalError, match=message):
            shoal(*arguments, *fault)


@pytest.mark.parametrize("form", [(), ("--full",), ("--json",)])
@pytest.mark.parametrize("text", ["The cat sat.", "", "A long text. " * 1000])
def test_one_text_is_answered_as_in_a_file(
    shoal: Shoal, server: Server, tmp_path: Path, text: str, form: tuple[str, ...]
) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    options = ["--url", server.grpc_url, "--model", "ensemble_all", *form]
    assert shoal("infer", text, *options) == shoal("infer", "-i", tmp_path / "texts.jsonl", *options)


def test_one_text_that_is_refused(server: Server) -> None:
    runs = [
        CliRunner().invoke(app, ["infer", *texts, "--url", server.grpc_url, "--model", "ensemble_all"])
        for texts in (["A \udcff."], ["A \udcff.", "A \udcff."])
    ]
    assert [run.exit_code for run in runs] == [1, 1]
    (error,) = [line for line in runs[0].output.splitlines() if line.startswith("row 1:")]
    assert error in runs[1].output.splitlines()
    assert "1 of 1 rows have an error." in runs[0].output


def test_curl_asks_over_http(shoal: Shoal, server: Server) -> None:
    arguments = ["infer", "The cat sat.", "--model", "ensemble_all", "--curl"]
    printed = shoal(*arguments, "--url", server.http_url)
    assert printed.startswith(f"curl http://{server.http_url}/v2/models/ensemble_all/infer ")
    assert subprocess.run(shlex.split(printed), capture_output=True, check=True).stdout.startswith(b'{"model_name":')
    with pytest.raises(ShoalError, match="is not a Triton that speaks http"):
        shoal(*arguments, "--url", server.grpc_url)


@pytest.mark.usefixtures("trained_for_a_moment")
def test_quickstart(shoal: Shoal, tiny_bert: Path, tmp_path: Path) -> None:
    printed = shoal("quickstart", "--out", tmp_path / "build", "--encoder", tiny_bert)
    for words in ("text", "BERT score", "forest score", "blended score", "RMSE on unseen texts"):
        assert words in printed
    for name in ("artifacts", "repository", "report"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"{name}: ")]
        assert Path(line.split(": ")[1]).exists()
    assert len([line for line in printed.splitlines() if line.startswith("│")]) == 8
