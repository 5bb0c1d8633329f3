"""Engine arguments of vLLM: what is right passes, and what is not is named with the way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.authoring.check.config.engines import check_arguments
from shoal.authoring.check.families import check
from shoal.authoring.check.findings import Finding, Place
from tests.support.planted import write
from tests.support.planted_engines import ARGS, CONFIG, GOOD, NPU, OURS, TEXTS, dump


def look(**arguments: Any) -> list[Finding]:
    return list(check_arguments(GOOD | arguments, lambda name: Place(Path(name))))


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_model_len": None},
        {"max_model_len": -1},
        {"cpu_offload_gb": 4},
        {"served_model_name": ["a", "b"]},
        {"served_model_name": "a"},
        {"hf_token": True},
        {"speculative_config": {"num_speculative_tokens": 3}},
        {"max_num_seqs": 4096},
        {"max_model_len": 8192, "max_num_batched_tokens": 4096},
        {"gpu_memory_utilization": 1},
        {"dtype": "bfloat16", "quantization": "awq", "seed": 0},
    ],
)
def test_what_vllm_takes_passes(arguments: dict[str, Any]) -> None:
    assert look(**arguments) == []


def test_a_near_miss_is_named_without_vllm() -> None:
    """A name that resembles none may be one of a newer vLLM."""
    for name in ("max_num_seq", "max-num-seqs", "--max-num-seqs", "MAX_NUM_SEQS"):
        (fault,) = look(**{name: 4})
        assert (fault.rule.id, fault.severity) == ("engine-args-misspelt", "warning")
        assert fault.what == f"vLLM 0.32 has the argument max_num_seqs; '{name}' is not known here."
        assert fault.fix == "Did you mean max_num_seqs?"
    assert look(zzz=4, elastic_ep_max_dp_size=2) == []


ARGUMENTS = """
class EngineArgs:
    model: str = ModelConfig.model
    served_model_name: str | list[str] | None = ModelConfig.served_model_name
    max_model_len: int | None = get_field(ModelConfig, "max_model_len")
    dtype: ModelDType = ModelConfig.dtype
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    enforce_eager: Optional[bool] = None
    limit_mm_per_prompt: dict[str, int | dict[str, int]] = get_field(MultiModalConfig, "limit_per_prompt")

    def __post_init__(self):
        note: int = 1

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
    max_num_seqs: Union[int, None] = None
"""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with a vLLM of other arguments than those that shoal knows."""
    folder = tmp_path / "environment"
    write(folder / "lib/python3.12/site-packages/vllm/engine/arg_utils.py", ARGUMENTS)
    write(folder / "conda-meta/python.json", '{"name": "python", "version": "3.12.1"}')
    return folder


def test_arguments_are_those_of_the_vllm_in_the_environment(environment: Path, tmp_path: Path) -> None:
    def find(**arguments: Any) -> list[tuple[str, str]]:
        text = OURS.replace('{"enforce_eager": true}', json.dumps(arguments))
        text += f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{environment}" }} }}\n'
        write(tmp_path / "repository" / "engine" / "config.pbtxt", text)
        found = check(tmp_path / "repository")
        return [(f.rule.id, f.fix) for f in found if f.rule.id.startswith("engine-args")]

    write(tmp_path / "repository" / "engine" / "1" / "model.py", "import shoal\n\n\nclass TritonPythonModel: pass\n")
    right: dict[str, Any] = {"enforce_eager": True, "served_model_name": ["a"], "limit_mm_per_prompt": {"image": 1}}
    assert find(**right, enable_log_requests=True) == []
    assert find(note=1) == [("engine-args-unknown", "Remove it.")]
    assert find(enforce_eagr=True) == [("engine-args-unknown", "Did you mean enforce_eager?")]
    assert find(tensor_parallel_size=2) == [("engine-args-unknown", "Remove it.")]  # which shoal knows, and it does not
    assert [rule for rule, _ in find(enforce_eager="yes")] == ["engine-args-value"]
    assert [rule for rule, _ in find(gpu_memory_utilization="0.9")] == ["engine-args-text"]
    assert [rule for rule, _ in find(served_model_name=1)] == ["engine-args-value"]


def test_a_text_is_read_for_the_fix() -> None:
    (fault,) = look(enforce_eager="False")
    assert "any text but the empty one counts as true" in fault.what
    assert fault.fix == 'Write "enforce_eager": false'
    (fault,) = look(gpu_memory_utilization="0.9")
    assert fault.fix == 'Write "gpu_memory_utilization": 0.9'


def test_relations_name_both_values() -> None:
    (fault,) = look(max_num_batched_tokens=4)
    assert fault.what == "max_num_batched_tokens (4) must be at least max_num_seqs (8)."
    (fault,) = look(enable_chunked_prefill=False, max_model_len=8192)
    assert fault.what == "max_num_batched_tokens (4096) must be at least max_model_len (8192) without chunked prefill."


def test_arguments_for_rbln_fit_the_compiled_model() -> None:
    def find(**arguments: Any) -> list[str]:
        found = check_arguments(NPU | arguments, lambda name: Place(Path(name)))
        return [str(finding.place) for finding in found][1:]  # the first is device

    assert find() == []
    assert find(block_size=1024) == []  # flash attention
    assert find(block_size=3000) == ["block_size"]
    assert find(max_num_batched_tokens=8192) == ["max_num_batched_tokens"]


def test_the_compiled_batch_is_read_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rbln-llama"
    write(folder / "rbln_config.json", json.dumps({"cls_name": "RBLNLlamaForCausalLMConfig", "batch_size": 2}))
    write(tmp_path / "repository" / CONFIG, TEXTS)
    for seqs, rules in ((2, ["engine-args-rbln"]), (4, ["engine-args-value", "engine-args-rbln"])):
        arguments = NPU | {"model": str(folder), "compiled_model_dir": str(folder), "max_num_seqs": seqs}
        write(tmp_path / "repository" / ARGS, json.dumps(arguments))
        assert [finding.rule.id for finding in check(tmp_path / "repository")] == rules


@pytest.mark.parametrize(("target", "rules"), [("25.06", []), ("26.01", ["engine-args-unknown"])])
def test_old_arguments_are_right_on_an_old_server(target: str, rules: list[str], tmp_path: Path) -> None:
    write(tmp_path / CONFIG, TEXTS)
    write(tmp_path / ARGS, dump(disable_log_requests=True))
    assert [finding.rule.id for finding in check(tmp_path, target=target)] == rules


def test_the_first_tutorial_is_read_in_both_places(tmp_path: Path) -> None:
    """A Python model, with its arguments beside config.pbtxt or in the version folder."""
    config = TEXTS.replace('"vllm"', '"python"').replace("model_transaction_policy { decoupled: true }\n", "")
    write(tmp_path / CONFIG, config)
    write(tmp_path / "llama/1/model.py", "class TritonPythonModel:\n    def execute(self, requests):\n        pass\n")
    for path in ("llama/vllm_engine_args.json", "llama/1/vllm_engine_args.json"):
        write(tmp_path / path, dump(disable_log_requests="true"))
        found = {finding.rule.id: finding.place for finding in check(tmp_path)}
        assert found["engine-args-removed"].path == tmp_path / path
        assert "vllm-not-decoupled" in found
        (tmp_path / path).unlink()


def test_what_the_backend_completes_may_be_left_out(tmp_path: Path) -> None:
    """NVIDIA's own example has neither tensors nor a policy."""
    write(tmp_path / CONFIG, 'backend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n')
    write(tmp_path / ARGS, '{"model": "facebook/opt-125m", "gpu_memory_utilization": 0.1, "enforce_eager": true}')
    assert check(tmp_path) == []


def test_instances_with_memory_for_all_are_right(tmp_path: Path) -> None:
    write(tmp_path / CONFIG, TEXTS.replace("count: 1", "count: 2"))
    write(tmp_path / ARGS, dump(gpu_memory_utilization=0.4))
    assert check(tmp_path) == []
    write(tmp_path / ARGS, dump(gpu_memory_utilization=0.6))
    (finding,) = check(tmp_path)
    assert finding.fix == "Write count: 1, or gpu_memory_utilization of at most 0.5."


@pytest.mark.parametrize(
    "text", ["", "nul", '"x"', "[1]", "{" * 2000, '{"model": NaN}', "\ud800", '{"model": "\\u0000"}']
)
def test_any_file_is_read_to_an_end(text: str, tmp_path: Path) -> None:
    write(tmp_path / CONFIG, TEXTS)
    write(tmp_path / ARGS, text.encode("utf-8", "surrogatepass"))
    check(tmp_path)
    write(tmp_path / ARGS, json.dumps({"model": "/" + "x" * 5000, "compiled_model_dir": "/" + "x" * 5000, "a": text}))
    check(tmp_path)
