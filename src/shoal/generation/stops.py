"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.errors import InputError


class StopCutter:
    """Cuts a text that comes in pieces before its first stop string, which may straddle pieces.

    The first stop string is the one that begins first. An end of the text that may still become a stop string is held
    back, at most one character less than the longest stop string has. What comes out does not depend on the division
    into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Take the stop strings.

        Raises:
            InputError: one of them is empty.
        """
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise InputError("A stop string is empty.", "Leave it out.")
        self._most_held = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self._has_stopped = False

    def step(self, text: str, *, last: bool = False) -> tuple[str, bool]:
        """Take the next piece; return the text to give out, and whether a stop string was found so far.

        With ``last`` nothing is held back. After a stop string the text is empty.
        """
        if self._has_stopped:
            return "", True
        text = self._held + text
        held = len(text) if last else self._find_held(text)
        stop = min((place for place in map(text.find, self._stops) if place >= 0), default=len(text))
        # A longer stop string may begin before the one that was found, and still be incomplete: wait for its end.
        self._has_stopped = stop < len(text) and stop <= held
        end = min(stop, held)
        self._held = "" if self._has_stopped else text[end:]
        return text[:end], self._has_stopped

    def _find_held(self, text: str) -> int:
        """Return where the end of the text begins that may become a stop string; the text's length if there is none."""
        for place in range(max(0, len(text) - self._most_held), len(text)):
            tail = text[place:]
            if any(stop.startswith(tail) for stop in self._stops):
                return place
        return len(text)
