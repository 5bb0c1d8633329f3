"""Plain requests over HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.support.service import Service


def ask(
    service: Service, path: str, body: bytes | Iterator[bytes] | None = None, method: str | None = None, **headers: str
) -> Any:
    """Status, headers and content."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{service.http}{path}", data=body, headers=named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()
