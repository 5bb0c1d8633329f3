"""``shoal fill`` beside TensorRT-LLM's own ``fill_template.py``, and ``shoal check`` on what both write.

SHOAL_TENSORRTLLM_BACKEND names a clone of https://github.com/triton-inference-server/tensorrtllm_backend at a tag from
v0.8.0 to v0.19.0, the last that has the script and the templates.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.authoring.check.families import check
from shoal.authoring.composition.fill import fill_template
from shoal.cli import app
from shoal.errors import ShoalError

OWN = "SHOAL_TENSORRTLLM_BACKEND"
VALUES = {
    "triton_max_batch_size": "64",
    "triton_backend": "tensorrtllm",
    "decoupled_mode": "True",
    "batching_strategy": "inflight_fused_batching",
    "engine_dir": "/engines/llama-7b/1-gpu",
    "tokenizer_dir": "/weights/llama-7b",
    "tokenizer_type": "auto",
    "max_beam_width": "1",
    "kv_cache_free_gpu_mem_fraction": "0.5",
    "max_attention_window_size": "2560",
    "gpu_device_ids": r"0\,1",
    "exclude_input_in_output": "True",
    "accumulate_tokens": "False",
    "max_queue_delay_microseconds": "10000",
    "max_queue_size": "128",
}
# Against one template; each is silent, or a traceback, in the script.
TRAPS = (
    "batch:9", "triton_max_batch_size:sixty", "preprocessing_instance_count:1", "tokenizer_dir:x,",
    "tokenizer_dir:x, triton_max_batch_size:8", "tokenizer_dir:hf://meta/llama",
)  # fmt: skip
# Lines of a guide to TensorRT-LLM, by model.
GUIDE = {
    "preprocessing": "tokenizer_dir:/w,tokenizer_type:auto,triton_max_batch_size:64,preprocessing_instance_count:1",
    "postprocessing": "tokenizer_dir:/w,tokenizer_type:auto,triton_max_batch_size:64,postprocessing_instance_count:1",
    "tensorrt_llm_bls": "triton_max_batch_size:64,decoupled_mode:true,bls_instance_count:1",
    "ensemble": "triton_max_batch_size:64",
    "tensorrt_llm": "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:true,engine_dir:/e,"
    "max_queue_delay_microseconds:10000,batching_strategy:inflight_fused_batching",
}
PLACES = re.compile(r"^[^#\n]*\$\{(\w+)\}", re.MULTILINE)


@pytest.fixture(scope="module")
def clone() -> Path:
    if OWN not in os.environ:
        pytest.skip(f"{OWN} names no clone of NVIDIA's tensorrtllm_backend")
    return Path(os.environ[OWN])


def find_value(key: str) -> str:
    kinds = {r".*count$": "1", r".*data_?type$": "TYPE_FP16"}
    return VALUES.get(key, next((value for kind, value in kinds.items() if re.fullmatch(kind, key)), ""))


def fill_theirs(clone: Path, path: Path, values: str) -> subprocess.CompletedProcess[bytes]:
    command: list[str | Path] = [sys.executable, clone / "tools" / "fill_template.py", path, values]
    return subprocess.run(command, capture_output=True, check=False, timeout=60)


def test_templates_are_filled_to_the_same_bytes(clone: Path, tmp_path: Path) -> None:
    templates = [
        path for path in sorted((clone / "all_models").rglob("config.pbtxt")) if "${" in path.read_text("utf-8")
    ]
    assert len(templates) >= 8
    for number, path in enumerate(templates):
        text = path.read_text(encoding="utf-8")
        (tmp_path / str(number)).mkdir()
        twin = tmp_path / str(number) / "config.pbtxt"
        twin.write_text(leave_out_second(text), encoding="utf-8")
        keys = [key for key in dict.fromkeys(PLACES.findall(text)) if not (key == "max_queue_size" and number % 2)]
        values = ",".join(f"{key}:{find_value(key)}" for key in keys)
        theirs = fill_theirs(clone, twin, values)
        ours = CliRunner().invoke(app, ["fill", str(twin), values])
        assert (theirs.returncode, ours.exit_code, ours.exception) == (0, 0, None), path
        assert ours.stdout_bytes == theirs.stdout, path
        if twin.read_text(encoding="utf-8") != text:
            with pytest.raises(
                ShoalError, match=r":\d+: .* declares the output kv_cache_alloc_total_blocks twice: here"
            ):
                fill_template(path, values)


def leave_out_second(text: str) -> str:
    """Remove the output that the ensemble of 0.19 lists twice."""
    block = re.compile(r"  \{\n    name: \"kv_cache_alloc_total_blocks\"\n[^}]*\},?\n")
    found = list(block.finditer(text))
    return text[: found[1].start()] + text[found[1].end() :] if len(found) > 1 else text


def test_filled_repositories_have_no_mistakes(clone: Path, tmp_path: Path) -> None:
    """Only what NVIDIA's guides set is given; the rest keeps its placeholder."""
    shutil.copytree(clone / "all_models" / "inflight_batcher_llm", tmp_path / "engine")
    for path in (tmp_path / "engine").glob("*/config.pbtxt"):
        path.write_text(leave_out_second(path.read_text(encoding="utf-8")), encoding="utf-8")
        keys = [key for key in dict.fromkeys(PLACES.findall(path.read_text(encoding="utf-8"))) if find_value(key)]
        values = ",".join(f"{key}:{find_value(key)}" for key in keys)
        theirs = fill_theirs(clone, path, values)
        done = CliRunner().invoke(app, ["fill", "-i", str(path), values, "--keep-unset"])
        assert (done.exit_code, done.output) == (0, ""), done.exception
        assert theirs.stdout == path.read_bytes() + b"\n"
    repositories = [tmp_path / "engine", *(clone / "all_models").glob("llmapi")]
    found = {(f.rule.id, f.place.path.name) for each in repositories for f in check(each)}
    assert found <= {("text-opened-as-ascii", "model.py")}  # true: json.load(open(...)) without an encoding


@pytest.mark.parametrize("model", GUIDE)
def test_the_refusals_of_a_guides_lines_say_what_to_type(model: str, clone: Path, tmp_path: Path) -> None:
    """Typed so, they fill the template, but for the output that the ensemble of 0.19 lists twice."""
    path = tmp_path / model / "config.pbtxt"
    path.parent.mkdir()
    shutil.copy(clone / "all_models" / "inflight_batcher_llm" / model / "config.pbtxt", path)
    values, options = GUIDE[model], list[str]()
    for _ in range(4):
        done = CliRunner().invoke(app, ["fill", "-i", str(path), values, *options])
        if done.exit_code == 0:
            break
        refused = str(done.exception)
        values = values.replace("tokenizer_type:auto,", "") if "Leave it out" in refused else values
        values += f",{added[1]}" if (added := re.search(r"Add (\w+:[\w:,]+)", refused)) else ""
        options = ["--keep-unset"] if "--keep-unset" in refused else options
        path.write_text(leave_out_second(path.read_text(encoding="utf-8")), encoding="utf-8")
    assert done.exit_code == 0, done.exception
    assert "tokenizer_type" not in values


@pytest.mark.parametrize("values", TRAPS)
def test_traps_are_refused_and_the_template_stays(values: str, clone: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    shutil.copy(clone / "all_models" / "inflight_batcher_llm" / "preprocessing" / "config.pbtxt", path)
    before = path.read_bytes()
    done = CliRunner().invoke(app, ["fill", "-i", str(path), values, "--keep-unset"])
    assert done.exit_code == 1
    assert isinstance(done.exception, ShoalError)
    assert path.read_bytes() == before
