"""Reasoning before an answer, between the marks with which many models write it."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def find_opening(prompt: str) -> str:
    """Return the mark at the end of a prompt, with the white space behind it: the answer goes on with the reasoning."""
    return prompt[prompt.rindex(OPEN) :] if prompt.rstrip().endswith(OPEN) else ""


class ReasoningReader:
    """Divides the text of one answer, in pieces, into its reasoning and the rest; white space between them is neither.

    An answer that does not begin with the mark has no reasoning.
    """

    def __init__(self) -> None:
        self._held = ""  # text that is not returned yet
        self._state = "before"  # before the mark, within, behind, or none
        self._has_begun = False  # whether some reasoning was returned

    def step(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take the next piece; return what is known to be reasoning, and what is known to be the rest."""
        self._held += text
        if self._state == "before":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._state, self._held = "within", begun[len(OPEN) :]
            elif last or not OPEN.startswith(begun):
                self._state = "none"
        reasoning = self._step_within(last) if self._state == "within" else ""
        if self._state == "behind":
            self._held = self._held.lstrip()
            self._state = "none" if self._held else "behind"
        if self._state != "none":
            return reasoning, ""
        rest, self._held = self._held, ""
        return reasoning, rest

    def _step_within(self, last: bool) -> str:
        if not self._has_begun:
            self._held = self._held.lstrip()
        found, mark, rest = self._held.partition(CLOSE)
        if mark:
            self._state, self._held = "behind", rest
        elif not last:  # white space at the end may be between, and its last characters the beginning of the mark
            size = next((size for size in range(len(CLOSE) - 1, 0, -1) if found.endswith(CLOSE[:size])), 0)
            found = found[: len(found) - size]
        found = found.rstrip()
        if not mark:
            self._held = "" if last else self._held[len(found) :]
        self._has_begun |= bool(found)
        return found
