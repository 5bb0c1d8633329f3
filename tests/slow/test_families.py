"""Families of transformers in the engine ``llm-hf``: the oracle is ``generate``, token by token."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from shoal.errors import ArtifactError, ShoalError
from tests.conftest import Scale, verified
from tests.support.families import ALONE, FAMILIES, NOT_EXPORTED, REFUSED, STATIC, make_family
from tests.support.generate import check_equal, expect
from tests.support.imports import add
from tests.support.llm import open_engine, token_inputs, tokens_of
from tests.support.once import ROOT

# Each way of batching, kind of positions, window, state, experts and reason of a refusal.
USUAL = {
    "llama", "llama-yarn", "mistral", "phi3-long", "opt", "bloom", "gpt-oss", "qwen3-moe", "deepseek-v3", "mamba",
    "jamba", "rwkv", "recurrent-gemma",
}  # fmt: skip
EXPORTED = {"gpt2", "mixtral", "bloom", "jamba", "jetmoe", "apertus"}


@pytest.mark.parametrize("name", sorted(USUAL) + verified(*sorted(FAMILIES.keys() - USUAL)))
def test_families_give_the_tokens_of_generate_or_are_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, scale: Scale
) -> None:
    """One and sixteen at a time, on both sides of every threshold of the configuration."""
    folder = make_family(name, tmp_path)
    if name in REFUSED:
        with pytest.raises(ArtifactError, match=REFUSED[name]), open_engine(folder):
            pass
        return
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig()
    random = np.random.default_rng(5)
    sizes = [1, 100, 2, 3, 8, 14, 16, 20, 25, 31, 32, 33, 40, 60, 80, 110] * scale(1, 2)
    asked = [(random.integers(3, 500, size).tolist(), 28 if size == 100 else 12) for size in sizes]
    expected = [expect(model, ids, new) for ids, new in asked]
    with caplog.at_level("INFO", "shoal"), open_engine(folder) as component:
        streams = [component.stream(token_inputs(ids, new)) for ids, new in asked]
        found = [tokens_of(stream) for stream in streams]
        found += [tokens_of(component.stream(token_inputs(ids, new))) for ids, new in asked[:6]]
    for tokens, right in zip(found, [*expected, *expected[:6]], strict=True):
        check_equal(tokens, right)
    way = "static batches" if name in STATIC else "one request at a time" if name in ALONE else "continuous batches"
    assert f"is computed in {way}" in caplog.text


@pytest.mark.parametrize("name", sorted(EXPORTED) + verified(*sorted(FAMILIES.keys() - EXPORTED)))
def test_decoders_in_onnx_give_the_tokens_of_generate_or_are_refused(name: str, tmp_path: Path) -> None:
    """The command compares the logits itself, prompts beside each other with a cache."""
    folder = make_family(name, tmp_path / "weights")
    if name in NOT_EXPORTED:
        with pytest.raises(ShoalError, match=NOT_EXPORTED[name]) as error:
            add(tmp_path / "project", folder, "decoder", task="generate")
        assert "Compose it with --engine hf" in error.value.fix
        return
    add(tmp_path / "project", folder, "decoder", task="generate")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config = GenerationConfig()
    random = np.random.default_rng(6)
    asked = [(random.integers(3, 500, size).tolist(), 12) for size in (1, 3, 17, 40, 100)]
    expected = [expect(model, ids, new) for ids, new in asked]
    with open_engine("", tmp_path / "project" / "models" / "decoder") as component:
        streams = [component.stream(token_inputs(ids, new)) for ids, new in asked]
        for stream, right in zip(streams, expected, strict=True):
            check_equal(tokens_of(stream), right)


def test_the_page_has_the_families() -> None:
    page = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    table = page.partition("| computed in | families |")[2].partition("\n\n")[0]
    found = {row.split("|")[1].strip(): set(re.findall(r"`([\w.-]+)`", row)) for row in table.splitlines()[2:]}
    assert found == {
        "continuous batches": set(FAMILIES) - STATIC - ALONE - set(REFUSED),
        "static batches": STATIC,
        "one request at a time": ALONE,
        "refused": set(REFUSED),
    }
    exported = page.partition("exports all of them but")[2].partition(".\n")[0]
    assert set(re.findall(r"`([\w.-]+)`", exported)) == set(NOT_EXPORTED)
    assert f"transformers {transformers.__version__.rpartition('.')[0]}" in page.replace("\n", " ")
