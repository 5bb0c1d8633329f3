"""Quantities that all clients share, such as memory and connections, with a share for each caller."""

from __future__ import annotations

from collections import Counter
from typing import Self

from shoal.serving.gateway.callers.callers import Caller


class Quota:
    """Quantity that all clients share, such as memory. One caller gets at most the part ``share``, up to 1."""

    def __init__(self, most: int, share: float) -> None:
        self.most, self.share = most, max(1, int(most * share))
        self.taken = 0
        self._of: Counter[str] = Counter()

    def has(self, caller: Caller, number: int = 1) -> bool:
        """Whether ``number`` more units are available to this caller."""
        return self.taken + number <= self.most and self._of[caller.id] + number <= self.share

    def take(self, caller: Caller, number: int = 1) -> None:
        """Take ``number`` units for a caller, even beyond the limit."""
        self.taken += number
        self._of[caller.id] += number

    def give_back(self, caller: Caller, number: int = 1) -> None:
        """Return ``number`` units from a caller to the quota."""
        self.taken -= number
        self._of[caller.id] -= number
        if not self._of[caller.id]:  # or entries of former clients would pile up
            del self._of[caller.id]


class Reservation:
    """Memory reservation of one request; it grows as bytes arrive, and is released as a whole."""

    def __init__(self, quota: Quota, caller: Caller) -> None:
        self._quota, self.caller, self.num_bytes = quota, caller, 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether the reservation may grow by ``num_bytes``."""
        return self._quota.has(self.caller, num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Grow the reservation by ``num_bytes``, or shrink it if that is negative.

        This works beyond the limit too, because an answer is held in any case.
        """
        self._quota.take(self.caller, num_bytes)
        self.num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the whole reservation."""
        self._quota.give_back(self.caller, self.num_bytes)
        self.num_bytes = 0
