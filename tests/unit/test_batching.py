"""The way of batching of a model on transformers: chosen by comparison with ``generate``, within bounds."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shoal.errors import ArtifactError, SetupError
from shoal.kit.generation.engines import batching
from shoal.kit.generation.engines.base import WAYS
from tests.support.families import CONTEXT, FAMILIES, REFUSED, make_family
from tests.support.llm import open_engine, token_inputs, tokens_of

LARGE = 7_000_000_000


def choose(folder: Path, caplog: pytest.LogCaptureFixture, **parameters: Any) -> str:
    """Return the log's line about the choice, after the engine has answered."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "shoal"), open_engine(folder, **parameters) as component:
        assert len(tokens_of(component.stream(token_inputs([5, 6, 7], 4)))) == 4
    (said,) = [record.getMessage() for record in caplog.records if record.name == "shoal"]
    return said


def test_continuous_batches_unless_another_way_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_family("llama", tmp_path)
    assert choose(folder, caplog) == "LlamaForCausalLM is computed in continuous batches"
    for name, words in WAYS.items():
        said = choose(folder, caplog, batching=name)
        assert said == f"LlamaForCausalLM is computed in {words}, as the parameter batching says, without a comparison"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_continuous_batching_computes_wrongly(
    dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = choose(make_family("diffllama", tmp_path), caplog, dtype=dtype)
    assert said.startswith(
        "DiffLlamaForCausalLM is computed in static batches; not in continuous batches: after a prompt of "
    )
    assert "the logits differ from those of generate by " in said


@pytest.mark.parametrize("family", [("MiMoV2Flash", {"v_head_dim": 4}), ("Doge", {"keep_window_size": CONTEXT})])
def test_a_way_that_failed_leaves_no_trace(
    family: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Continuous batches change the attention of the model before they fail; static ones compute as ``generate``."""
    more = {"head_dim": 8, "n_routed_experts": 4, "num_experts": 4, "moe_intermediate_size": 16, "sliding_window": 16}
    monkeypatch.setitem(FAMILIES, "one", (family[0], {**more, "num_experts_per_tok": 2, **family[1]}))
    with open_engine(make_family("one", tmp_path)) as component:
        assert component.context.device.ledger.findings["batching"] == "static"
        assert len(tokens_of(component.stream(token_inputs([5, 6, 7], 4)))) == 4


def test_reformer_without_a_padding_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills prompts that are longer than a chunk; what fills them has no effect."""
    more = {
        "is_decoder": True, "attn_layers": ["local"] * 3, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16],
        "feed_forward_size": 48, "attention_head_size": 8, "local_attn_chunk_length": 16,
    }  # fmt: skip
    monkeypatch.setitem(FAMILIES, "one", ("Reformer", more))
    folder, answers = make_family("one", tmp_path), []
    for padding in (3, None):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "pad_token_id": padding}), encoding="utf-8")
        with open_engine(folder) as component:
            answers.append([tokens_of(component.stream(token_inputs([*range(5, 5 + n)], 8))) for n in (3, 20, 45)])
    assert answers[0] == answers[1]


def test_configurations_are_as_before_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Failing:
        def __init__(self, model: PreTrainedModel, *_: Any, **__: Any) -> None:
            seen.append((model.config._attn_implementation, hasattr(model.config, "trace")))
            model.config._attn_implementation = "paged|eager"
            model.config.trace = 1
            raise SetupError("It does not start.")

    monkeypatch.setattr(batching, "HfEngine", Failing)
    monkeypatch.setattr(batching, "HfStaticEngine", Failing)
    with pytest.raises(ArtifactError, match="cannot serve"), open_engine(make_family("llama", tmp_path)):
        pass
    assert seen == [("sdpa", False)] * 3


def test_a_rope_that_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long requests are not computed beside others. Where a prompt of that length is too dear, it is not tried."""
    folder = make_family("phi3-long", tmp_path)
    assert choose(folder, caplog, context="32") == "Phi3ForCausalLM is computed in continuous batches"
    assert "in static batches; not in continuous batches: after a prompt of" in choose(folder, caplog)
    monkeypatch.setattr(batching, "_MOST_TOKENS", 31)
    assert choose(folder, caplog) == (
        "Phi3ForCausalLM is computed in static batches; not in continuous batches: its rope changes after 32 tokens"
    )


def test_no_way_is_right(tmp_path: Path) -> None:
    """This model keeps a state between prompts of a single token, also in its own generate."""
    folder = make_family("recurrent-gemma", tmp_path)
    with pytest.raises(ArtifactError, match=REFUSED["recurrent-gemma"]), open_engine(folder):
        pass


def test_a_large_model_answers_a_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    forward: Any = torch.nn.Module.__call__

    def count(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, PreTrainedModel) and "input_ids" in kwargs and hasattr(module, "lm_head"):
            given.append(kwargs["input_ids"].numel())
        return forward(module, *args, **kwargs)

    folder = make_family("mistral", tmp_path)
    monkeypatch.setattr(torch.nn.Module, "__call__", count)
    for weights, steps, tokens in ((LARGE, 30, 80), (50_000, 150, 500)):
        monkeypatch.setattr(PreTrainedModel, "num_parameters", lambda self, size=weights: size)
        given.clear()
        with open_engine(folder):
            pass
        assert 10 < len(given) <= steps
        assert sum(given) <= tokens
