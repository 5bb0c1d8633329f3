"""The table of sampling settings: what repeats it is as it says, and a new row appears everywhere."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.once import ROOT

_PROGRAM = runpy.run_path(str(ROOT / "docs" / "settings.py"))
FILES, rewrite = _PROGRAM["FILES"], _PROGRAM["rewrite"]
NVIDIAS = ("ensembles/ensemble", "models/tensorrt_llm", "models/tensorrt_llm_bls")
ROW = """
    typical_p: float = setting(1.0, "FP32", lambda value: 0 < value <= 1, "more than 0, and at most 1", "Typicality.")
"""
# With this table: what the checks, an engine, the client, the command line and the prompt component do.
USE = """
import json
import numpy as np
from typer.testing import CliRunner
from shoal import cli
from shoal.errors import InputError
from shoal.kit.generation.contract import Limits
from shoal.kit.generation.sampling import Sampling
from shoal.kit.generation.contract import TokenRequest
from shoal.kit.generation.prompts import stack
from shoal.kit.generation.engines.onnx import OnnxEngine
from shoal.clients.llm.client import GenerationSettings
from shoal.clients.llm.dialects import Dialect

def fault(call):
    try: call()
    except InputError as error: return str(error)

request = {"input_ids": np.array([[1]]), "request_output_len": np.array([[1]]), "typical_p": np.float32([[0.5]])}
print(json.dumps({
    "check": fault(Sampling(typical_p=3.0).check),
    "engine": fault(lambda: TokenRequest.read(request, Limits(9, 9, 1)).sampling.check_applied(OnnxEngine.settings)),
    "client": str(Dialect([]).to_inputs("a", {"typical_p": 0.5}, is_streaming=True)["typical_p"]),
    "types": str(GenerationSettings.__annotations__.get("typical_p")),
    "command": CliRunner().invoke(cli.app, ["generate", "--help"], env={"COLUMNS": "400"}).output,
}))
"""


def test_each_place_is_as_the_table_says() -> None:
    for name in FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "settings: " in text
        assert rewrite(text) == text, f"{name}: type: python docs/settings.py"


def test_no_tensors_of_settings_are_written_by_hand() -> None:
    """A place without its lines would not be compared. The tensors of TensorRT-LLM's models are NVIDIA's."""
    for path in {*ROOT.glob("*/*/config.pbtxt")} - {ROOT / name / "config.pbtxt" for name in NVIDIAS}:
        text = path.read_text(encoding="utf-8")
        if 'name: "repetition_penalty"' in text:
            assert path.relative_to(ROOT).as_posix() in FILES


@pytest.mark.usefixtures("may_start_processes")
def test_a_row_of_the_table_appears_everywhere(tmp_path: Path) -> None:
    for name in (*FILES, "docs/settings.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "src" / "shoal" / "kit" / "generation" / "sampling.py"
    source = table.read_text(encoding="utf-8")
    table.write_text(source.replace("\n    @property\n    def is_greedy", f"{ROW}\n    @property\n    def is_greedy"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    run(str(tmp_path / "docs" / "settings.py"))
    for name in FILES:
        assert "typical_p" in (tmp_path / name).read_text(encoding="utf-8"), name
    found = json.loads(run("-c", USE))
    assert found["check"] == "typical_p is 3.0. Send more than 0, and at most 1."
    assert found["engine"] == "typical_p is 0.5, and this model's engine does not apply it. Leave it out."
    assert (found["client"], found["types"]) == ("[0.5]", "ForwardRef('float', module='shoal.clients.llm.client')")
    assert "typical_p" in found["command"]
    config = (tmp_path / "ensembles" / "llm" / "config.pbtxt").read_text(encoding="utf-8")
    for line in (
        '{ name: "typical_p" data_type: TYPE_FP32 dims: [ 1 ] optional: true },  # Typicality.',
        'input_map { key: "typical_p" value: "typical_p" }',
        'output_map { key: "typical_p" value: "prompt_typical_p" }',
        'input_map { key: "typical_p" value: "prompt_typical_p" }',
    ):
        assert config.count(line) == 1
