"""Prompts that cannot fit the context: the whole of such a text is not tokenised."""

from __future__ import annotations

import pytest

from shoal.errors import InputError
from shoal.kit.generation.chats import llama2
from shoal.kit.generation.prompts import Prompts
from shoal.lab.tiny_llm import make_tokenizer


def test_a_text_that_cannot_fit_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, sizes = make_tokenizer(), list[int]()
    prompts = Prompts(tokenizer, llama2, context=100)

    def count(self: Prompts, text: str) -> list[int]:
        sizes.append(len(text))
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    monkeypatch.setattr(Prompts, "_ids", count)
    with pytest.raises(InputError, match=r"has more than \d+ tokens; the model's context is 100, with the answer"):
        prompts.encode("The cat sat. " * 50_000)
    with pytest.raises(InputError, match="has more than"):
        prompts.encode(messages=[{"role": "user", "content": "The cat sat. " * 50_000}])
    assert sizes == [8 * 164] * 2
    # tokens of many characters: the text is longer than the beginning that is tried, and fits
    tokenizer.add_tokens(["-" * 50])
    sizes.clear()
    assert len(prompts.encode("-" * 50 * 95)) == 95
    assert sizes == [8 * 164]
