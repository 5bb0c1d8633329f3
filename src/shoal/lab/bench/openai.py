"""Requests to servers with OpenAI's API, as a benchmark sends them: streamed completions, and counts of tokens."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from queue import Empty, LifoQueue
from typing import Any
from urllib.parse import urlsplit

from shoal.clients.client.operators import read_page
from shoal.clients.client.tls import Access, Tls
from shoal.errors import InputError, ServerError, ShoalError
from shoal.kit.generation.pieces import Piece

_TIMEOUT = 600.0  # seconds
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_USAGE, _EVERY = {"include_usage": True}, {"continuous_usage_stats": True}
# Fields that not every server knows: answers of exactly the wanted length, and counts of tokens, in every piece.
_MORE: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("min_tokens", {**_USAGE, **_EVERY}),
    ("min_tokens", _USAGE),
    ("", _USAGE),
    ("", {}),
)


def speaks_openai(url: str, access: Access) -> bool:
    """Whether ``url`` ends with ``/v1``, or its server lists models as OpenAI's API does, and not as shoal does."""
    if url.rstrip("/").endswith("/v1"):
        return True
    if not url.startswith(("http://", "https://")):
        return False
    try:
        models = json.loads(read_page(url, "/v1/models", **access))["data"]
        return bool(models) and not any(each["owned_by"] == "shoal" for each in models)
    except (ShoalError, ValueError, KeyError, TypeError):
        return False


def read_models(url: str, access: Access) -> list[str]:
    """Return the names of a server's models.

    Raises:
        ServerError: it does not list them.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        return [str(each["id"]) for each in json.loads(read_page(root, "/v1/models", **access))["data"]]
    except (ValueError, KeyError, TypeError):
        raise ServerError(f"The server at {url} does not list models as OpenAI's API does.", "Check --url.") from None


class OpenAi:
    """A model of a server with OpenAI's API. Threads may share the object; close it after use."""

    def __init__(self, url: str, model: str, access: Access) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        self._host, self._model = parts.netloc, model
        self._tls = (
            Tls.read(access.get("ca_cert", ""), access.get("client_cert", "")) if parts.scheme == "https" else None
        )
        key = access.get("api_key", "")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._idle: LifoQueue[http.client.HTTPConnection] = LifoQueue()
        self._form: tuple[str, tuple[str, Mapping[str, Any]]] | None = None  # path, and one of _MORE

    def stream(self, prompt: str, max_tokens: int) -> Iterator[Piece]:
        """Stream a greedy answer; without ``max_tokens`` (0), as long as the model makes it.

        The first request finds out which path and which fields the server takes.

        Raises:
            InputError: the server refuses the request.
            ServerError: the server cannot be reached, or the answer ends before its last piece.
        """
        refused = ""
        for path, more in [self._form] if self._form else [(p, m) for p in (_COMPLETIONS, _CHAT) for m in _MORE]:
            answer, connection = self._send(path, self._body(path, prompt, max_tokens, more))
            if answer.status == 200:
                self._form = path, more
                with ExitStack() as on_error:
                    on_error.callback(connection.close)
                    yield from self._read(answer)
                    on_error.pop_all()
                self._idle.put(connection)
                return
            with closing(connection):
                refused = refused or _read_error(answer)
            if answer.status not in (400, 404, 405, 422):
                raise ServerError(f"{self._model} at {self._host} answered HTTP {answer.status}: {refused}")
        raise InputError(f"{self._model} at {self._host} refused the request: {refused}")

    def close(self) -> None:
        """Close every connection that no request uses."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _body(self, path: str, prompt: str, max_tokens: int, more: tuple[str, Mapping[str, Any]]) -> bytes:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
        fields: dict[str, Any] = {"model": self._model, "stream": True, "temperature": 0}
        fields |= asked if path == _CHAT else {"prompt": prompt}
        if max_tokens:
            fields |= dict.fromkeys(filter(None, ("max_tokens", more[0])), max_tokens)
        return json.dumps(fields | ({"stream_options": more[1]} if more[1] else {})).encode()

    def _send(self, path: str, body: bytes) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        while True:
            try:
                connection, is_new = self._idle.get_nowait(), False
            except Empty:
                connection, is_new = self._connect(), True
            try:
                connection.request("POST", path, body, self._headers)
                return connection.getresponse(), connection
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_new:  # else: the server has closed it, as it was idle
                    raise ServerError(f"The server at {self._host} does not answer: {error}.", "Check --url.") from None

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls:
            return http.client.HTTPSConnection(self._host, timeout=_TIMEOUT, context=self._tls.context)
        return http.client.HTTPConnection(self._host, timeout=_TIMEOUT)

    def _read(self, answer: http.client.HTTPResponse) -> Iterator[Piece]:
        inputs = outputs = 0
        is_whole = False
        try:
            for line in answer:
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    is_whole = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(f"The answer of {self._model} ended: {event['error']}")
                usage = event.get("usage") or {}
                inputs, outputs = usage.get("prompt_tokens", inputs), usage.get("completion_tokens", outputs)
                choice = (event.get("choices") or [{}])[0]
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                yield Piece(text, choice.get("finish_reason") or "", inputs, outputs)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ServerError(f"The answer of {self._model} at {self._host} ended early: {error}") from None
        if not is_whole:
            raise ServerError(f"The answer of {self._model} at {self._host} ended before its last piece.")


def _read_error(answer: http.client.HTTPResponse) -> str:
    body = answer.read(2000).decode(errors="replace")
    try:
        document = json.loads(body)
        error = document.get("error", document)
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, AttributeError):
        return body.strip() or answer.reason
