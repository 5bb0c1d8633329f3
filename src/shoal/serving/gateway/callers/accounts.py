"""Accounts of keys: what each key has used of its limits, and the counts of its requests and tokens."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Self

from shoal.serving.gateway.callers.key_file import KeyLimits
from shoal.serving.gateway.refusals import RefusalReason, RefusedError

Clock = Callable[[], float]
MOST_FAILURES = 20  # wrong keys of one address in a minute
_MINUTE = 60.0
_GRAIN = 0.1  # seconds of uses that are kept as one entry, which bounds the number of entries
_MOST_ADDRESSES = 4096


class Window:
    """Amount that was used in the last minute, so that no minute, whenever it begins, has more than is allowed."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock, self._used = clock or time.monotonic, 0
        self._uses: deque[tuple[float, int]] = deque()  # time of the last use in an entry, and the entry's amount

    @property
    def used(self) -> int:
        """The amount used in the last minute."""
        while self._uses and self._clock() - self._uses[0][0] >= _MINUTE:
            self._used -= self._uses.popleft()[1]
        return self._used

    def add(self, amount: int = 1) -> None:
        """Use an amount."""
        now, total = self._clock(), amount
        if self._uses and self._uses[-1][0] // _GRAIN == now // _GRAIN:
            total += self._uses.pop()[1]
        self._uses.append((now, total))
        self._used += amount

    def wait(self, most: int) -> float:
        """Return the seconds until less than ``most`` was used in the last minute; 0 if that is so now."""
        above = self.used - most
        for moment, amount in self._uses:
            if above < 0:
                break
            above -= amount
            end = moment + _MINUTE
        return max(0.0, end - self._clock()) if self.used >= most else 0.0

    @property
    def rest(self) -> float:
        """The seconds until nothing was used in the last minute."""
        return self._uses[-1][0] + _MINUTE - self._clock() if self.used else 0.0


class Account:
    """Use that one key has made of its limits. Requests are those for inference; each message of a stream is one."""

    def __init__(self, name: str, limits: KeyLimits, clock: Clock | None = None) -> None:
        self.name, self.limits = name, limits
        self.outcomes, self.tokens = Counter[str](), Counter[str]()  # since the start; by outcome, and by kind
        self._requests, self._tokens, self._at_once = Window(clock), Window(clock), 0

    def check(self) -> None:
        """Raise ``RefusedError`` if the key may not send another request now; it says when it may."""
        most = self.limits
        if most.requests_per_minute and (wait := self._requests.wait(most.requests_per_minute)):
            raise self._refuse(f"{most.requests_per_minute} requests a minute", wait)
        if most.tokens_per_minute and (wait := self._tokens.wait(most.tokens_per_minute)):
            raise self._refuse(f"{most.tokens_per_minute} tokens a minute", wait)
        if most.at_once and self._at_once >= most.at_once:
            raise self._refuse(f"{most.at_once} requests at once", 1.0)

    def _refuse(self, what: str, wait: float) -> RefusedError:
        return RefusedError(
            RefusalReason.LIMIT, f"Too many requests for the key {self.name}: its limit is {what}.", wait
        )

    @contextmanager
    def use(self) -> Iterator[None]:
        """Count a request that has begun, until the context ends."""
        if self.limits.requests_per_minute:
            self._requests.add()
        self._at_once += 1
        try:
            yield
        finally:
            self._at_once -= 1

    def count_tokens(self, kind: str, number: int) -> None:
        """Count tokens of a prompt or an answer."""
        self.tokens[kind] += number
        if number and self.limits.tokens_per_minute:
            self._tokens.add(number)

    def headers(self) -> Iterator[tuple[str, str]]:
        """Yield the headers that say what is left of the limits, and the seconds until all of it is there again."""
        most = self.limits
        for kind, limit, window in (
            ("requests", most.requests_per_minute, self._requests),
            ("tokens", most.tokens_per_minute, self._tokens),
        ):
            if limit:
                yield f"x-ratelimit-limit-{kind}", str(limit)
                yield f"x-ratelimit-remaining-{kind}", str(max(0, limit - window.used))
                yield f"x-ratelimit-reset-{kind}", f"{window.rest:.3f}s"
        if most.at_once:
            yield "x-ratelimit-limit-at-once", str(most.at_once)
            yield "x-ratelimit-remaining-at-once", str(max(0, most.at_once - self._at_once))


class Together:
    """Use of an account by one request that is sent in parts: the first part that is admitted counts.

    It is a context, at whose end the request has ended.
    """

    def __init__(self, account: Account) -> None:
        self._account, self._used = account, ExitStack()
        self._is_used = False

    def check(self) -> None:
        """Raise ``RefusedError`` if the key may not send another request now, and no part was admitted yet."""
        if not self._is_used:
            self._account.check()

    def use(self) -> AbstractContextManager[None]:
        """Count the request, unless an earlier part has done it."""
        if not self._is_used:
            self._is_used = True
            self._used.enter_context(self._account.use())
        return nullcontext()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._used.close()


class Failures:
    """Wrong keys by address: after 20 in a minute, the address has to wait before its wrong keys are looked at."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock, self._of = clock, OrderedDict[str, Window]()  # the address that failed last is the last one

    def add(self, address: str) -> float:
        """Count a wrong key; return the seconds until another may be tried, 0 if now."""
        window = self._of.pop(address, None) or Window(self._clock)
        self._of[address] = window
        if len(self._of) > _MOST_ADDRESSES:
            self._of.popitem(last=False)
        if wait := window.wait(MOST_FAILURES):
            return wait
        window.add()
        return 0.0
