"""Reasoning in answers, cut anywhere, and prompts that begin it."""

from __future__ import annotations

import random

import pytest

from shoal.kit.generation.reasoning import ReasoningReader, find_opening

TEXTS = [
    (
        "<think>\nFirst  this,\n\nthen < that. </b>\n</think>\n\nThe answer.\n",
        "First  this,\n\nthen < that. </b>",
        "The answer.\n",
    ),
    ("<think>\n\n</think>\n\nThe <think> answer.", "", "The <think> answer."),
    (" <think>a</think>b</think>", "a", "b</think>"),
    ("<think>It is cut </thi", "It is cut", ""),
    ("The answer. <think>no</think>", "", "The answer. <think>no</think>"),
    ("  spaces", "", "  spaces"),
    ("<thin", "", "<thin"),
    ("<think></think>", "", ""),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "rest"), TEXTS)
def test_reasoning_is_divided_from_the_rest(text: str, reasoning: str, rest: str) -> None:
    for seed in range(30):
        numbers, reader, at = random.Random(seed), ReasoningReader(), 0
        found = []
        while at < len(text):
            size = numbers.randint(1, 9) if seed else 1
            found.append(reader.step(text[at : at + size]))
            at += size
        found.append(reader.step("", last=True))
        assert "".join(each for each, _ in found).removesuffix("</thi").rstrip() == reasoning
        assert "".join(each for _, each in found) == rest


def test_prompts_that_begin_the_reasoning() -> None:
    assert find_opening("<|assistant|><think>\n") == "<think>\n"
    assert find_opening("<think>") == "<think>"
    for prompt in ("", "<think>\n\n</think>\n\n", "<|assistant|>"):
        assert find_opening(prompt) == ""
