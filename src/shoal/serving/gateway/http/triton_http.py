"""Connections to Triton over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
from yarl import URL

from shoal.serving.gateway.core.triton_errors import is_dead, reword
from shoal.serving.gateway.core.upstream import Reply
from shoal.serving.gateway.http.bodies import CHUNK, LARGE, cut, join
from shoal.serving.gateway.refusals import FailedError, LostError
from shoal.serving.server.launch import Server

_ADDED_HEADERS = "Accept", "Accept-Encoding", "Content-Type", "User-Agent"  # which aiohttp would add
# Errors that Triton reports as its own faults although the request's JSON is at fault.
_UNREADABLE = re.compile(r"Unable to (parse|set) |failed to parse ")


class TritonHttp:
    """Connections to a Triton server over HTTP."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            skip_auto_headers=_ADDED_HEADERS,
        )

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", *, is_admin: bool = False
    ) -> Reply:
        """Send an HTTP request to Triton and return its reply.

        Raises:
            LostError: the server, or a process of the model, died.
            FailedError: Triton answered with an error.
        """
        url = URL(f"http://{self._server.http_url}{path}", encoded=True)
        data: Any = body or None
        if is_admin:
            headers = {**headers, "admin-key": self._server.admin_key}
        if len(body) > CHUNK:
            data, headers = cut(body), {**headers, "Content-Length": str(len(body))}
        try:
            async with self._session.request(method, url, data=data, headers=headers, allow_redirects=False) as reply:
                if (reply.content_length or LARGE) < LARGE:
                    content = await reply.read()
                else:
                    content = await join([part async for part in reply.content.iter_any()])
        except (aiohttp.ClientError, ConnectionError) as error:
            raise LostError(str(error)) from None
        if reply.status >= 400:
            raise _judge_reply(reply.status, content)
        return Reply(reply.headers, content)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def _judge_reply(status: int, content: bytes) -> LostError | FailedError:
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):  # an error that is not Triton's JSON
        message = f"The server answered with status {status} and gave no reason."
    if is_dead(message):
        return LostError(message)
    status = 400 if _UNREADABLE.match(message) else status
    return FailedError(status, reword(message), is_fault=status >= 500)
