"""Options of a client and of a request, validated before anything is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.client.calls import Parameter
from shoal.client.failures import PORTS
from shoal.client.wire import RESERVED
from shoal.errors import InputError

MAX_SECONDS = 1e7  # largest time-out that the libraries support


class Settings(NamedTuple):
    """Validated options of a client."""

    url: str
    protocol: str
    timeout: float
    concurrency: int
    retries: int
    is_repeatable: bool

    @classmethod
    def checked(
        cls, url: str, protocol: str, timeout: float, concurrency: int, retries: int, is_repeatable: bool
    ) -> Settings:
        """Validate the options given by a caller.

        Raises:
            InputError: a value is invalid.
        """
        if protocol not in PORTS:
            raise InputError(f"Unknown protocol {protocol!r}.", f"Known: {', '.join(PORTS)}.")
        check_timeout(timeout)
        _check_count("concurrency", concurrency, 1)
        _check_count("retries", retries, 0)
        return cls(check_url(url, protocol), protocol, timeout, concurrency, retries, is_repeatable)


def check_url(url: str, protocol: str) -> str:
    """Normalise ``url`` to HOST:PORT.

    Raises:
        InputError: it names another protocol, or no port.
    """
    example = f"127.0.0.1:{PORTS[protocol]}"
    scheme, _, rest = str(url).rpartition("://")
    if scheme not in ("", protocol):
        raise InputError(
            f"{url} names the protocol {scheme}; this client speaks {protocol}, without encryption.",
            f"Give the address alone, {rest.rstrip('/') if scheme == 'http' else example}"
            + (", and the protocol: --protocol http, in Python protocol='http'" if scheme == "http" else ""),
        )
    address = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:/@?#\[\]]+):(\d{1,5})/?", rest)
    if not address or not 0 < int(address[2]) < 2**16:
        raise InputError(f"{url!r} is not HOST:PORT.", f"Triton's port for {protocol} is {PORTS[protocol]}: {example}")
    return f"{address[1]}:{address[2]}"


def check_timeout(seconds: float, name: str = "timeout") -> float:
    """Return ``seconds``, checked to be a finite number above 0.

    Raises:
        InputError: it is not.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0 or math.isinf(seconds):
        raise InputError(f"{name} is {seconds!r}; it must be a number of seconds above 0.", f"For a minute: {name}=60")
    return seconds


def closed_client() -> InputError:
    """Build the error for the use of a client after ``close``."""
    return InputError("This client is closed.", "Make another.")


def _check_count(name: str, count: int, least: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise InputError(
            f"{name} is {count!r}; it must be a whole number, {least} or more.", f"Give {name}={least + 3}"
        )


def check_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Check request parameters for the types that the protocol supports.

    Raises:
        InputError: one has another type, or its name is reserved by Triton.
    """
    for name, value in parameters.items():
        if name in RESERVED or name.startswith("triton_"):
            raise InputError(f"The parameter {name} is reserved by Triton.", "Choose another name.")
        is_number = type(value) in (bool, float) or (type(value) is int and -(2**63) <= value < 2**63)
        if not is_number and not isinstance(value, str):
            raise InputError(f"The parameter {name} is {value!r}.", "Give a str, a bool, a float or an int of 64 bits.")
    return dict(parameters)


def merge(inputs: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the inputs given as a mapping and as keywords.

    Raises:
        InputError: one is in both.
    """
    both = sorted((inputs or {}).keys() & named.keys())
    if both:
        raise InputError(f"The input {both[0]} is given twice.", "Give it in the mapping or by keyword.")
    return {**(inputs or {}), **named}
