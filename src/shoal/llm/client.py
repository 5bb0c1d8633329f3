"""Clients of language models: texts or chats in, text out, from a server or from a pipeline in this process."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, Unpack, get_type_hints

import numpy as np

from shoal.client.aio import AsyncClient
from shoal.client.client import Client
from shoal.errors import InputError, ServerError, suggest
from shoal.pieces import Piece, join_pieces

Messages: TypeAlias = Sequence[Mapping[str, str]]


class Settings(TypedDict, total=False):
    """Settings of one request; for a setting that is left out, the model's default applies.

    ``shoal.generation.sampling`` has their meaning and their limits.
    """

    # settings: types (written by docs/settings.py)
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int
    min_tokens: int
    frequency_penalty: float
    presence_penalty: float
    stop_words: Sequence[str]
    bad_words: Sequence[str]
    # end of settings


_LISTS = {name for name, kind in get_type_hints(Settings).items() if kind == Sequence[str]}


class Pipeline(Protocol):
    """Interface of a pipeline in this process; ``shoal.Pipeline`` has it."""

    def stream(self, **inputs: Any) -> Generator[Mapping[str, Any]]:
        """Yield the answers to one request."""


class Wish(NamedTuple):
    """Time-outs in seconds, and the request's id; only servers have them."""

    timeout: float | None
    between: float | None
    request_id: str

    def check_empty(self) -> None:
        """Raise ``InputError`` if there is one, because a pipeline in this process would ignore it."""
        if given := next((name for name, value in self._asdict().items() if value), None):
            raise InputError(f"{given} is given, and the pipeline runs in this process.", "Leave it out.")


class Llm:
    """Language model on a server, through a ``Client``, or in this process, as a ``Pipeline`` of ``shoal.load``::

        with shoal.Client("127.0.0.1:8001") as client:
            print(Llm(client).generate("Once upon a time", max_tokens=20).text)
            for piece in Llm(client).stream([{"role": "user", "content": "Hello"}]):
                print(piece.text, end="")

    A prompt is a text, or a list of messages that the model's chat template turns into a text. Without ``model``, the
    server's default model is asked.
    """

    def __init__(self, source: Client | Pipeline, model: str = "") -> None:
        self._source = source
        self._model = model or (source.default_model() if isinstance(source, Client) else "")

    def generate(
        self,
        prompt: str | Messages,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **settings: Unpack[Settings],
    ) -> Piece:
        """Return the whole answer to ``prompt``; ``timeout`` is in seconds.

        ``request_id`` names the request on a server: in its log, and in a request with ``stop`` that ends it.

        Raises:
            InputError: the prompt or a setting is refused.
            ServerError: there was no complete answer, or not in time.
        """
        inputs = to_inputs(prompt, settings, is_streaming=False)
        with closing(self._ask(inputs, Wish(timeout, None, request_id))) as pieces:
            return join_pieces([*pieces])

    def stream(
        self,
        prompt: str | Messages,
        *,
        timeout: float | None = None,
        between: float | None = None,
        request_id: str = "",
        **settings: Unpack[Settings],
    ) -> Generator[Piece]:
        """Yield the answer to ``prompt`` in pieces; to stop the model before the end, close the generator.

        ``timeout`` is the greatest number of seconds to the first piece, ``between`` from each piece to the next;
        ``request_id`` is as in ``generate``.

        Raises:
            InputError, ServerError: as in ``generate``; ``ServerError`` also after some pieces.
        """
        return self._ask(to_inputs(prompt, settings, is_streaming=True), Wish(timeout, between, request_id))

    def _ask(self, inputs: dict[str, Any], wish: Wish) -> Generator[Piece]:
        answers: Any
        if isinstance(self._source, Client):
            answers = self._source.stream(self._model, inputs, **wish._asdict())
        else:
            wish.check_empty()
            answers = self._source.stream(**inputs)
        last = None
        with closing(answers):
            for answer in answers:
                last = read_piece(answer)
                yield last
        check_end(last)


class AsyncLlm:
    """Language model behind an ``AsyncClient``, or in this process in threads; see ``Llm``."""

    def __init__(self, source: AsyncClient | Pipeline, model: str = "") -> None:
        self._source, self._model = source, model

    async def generate(
        self,
        prompt: str | Messages,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **settings: Unpack[Settings],
    ) -> Piece:
        """Return the whole answer; see ``Llm.generate``."""
        inputs = to_inputs(prompt, settings, is_streaming=False)
        return join_pieces([piece async for piece in self._ask(inputs, Wish(timeout, None, request_id))])

    def stream(
        self,
        prompt: str | Messages,
        *,
        timeout: float | None = None,
        between: float | None = None,
        request_id: str = "",
        **settings: Unpack[Settings],
    ) -> AsyncGenerator[Piece]:
        """Yield the answer in pieces; see ``Llm.stream``."""
        return self._ask(to_inputs(prompt, settings, is_streaming=True), Wish(timeout, between, request_id))

    async def _ask(self, inputs: dict[str, Any], wish: Wish) -> AsyncGenerator[Piece]:
        last = None
        if not isinstance(self._source, AsyncClient):
            wish.check_empty()
            answers = self._source.stream(**inputs)
            try:
                while (answer := await asyncio.to_thread(next, answers, None)) is not None:
                    last = read_piece(answer)
                    yield last
            finally:
                await asyncio.shield(asyncio.to_thread(_close, answers))
            check_end(last)
            return
        self._model = self._model or await self._source.default_model()
        async with self._source.stream(self._model, inputs, **wish._asdict()) as replies:
            async for answer in replies:
                last = read_piece(answer)
                yield last
        check_end(last)


def _close(answers: Generator[Any]) -> None:
    """Close a generator, also one that another thread still waits in: a task was cancelled meanwhile."""
    while answers.gi_running:
        time.sleep(0.01)
    answers.close()


def to_inputs(prompt: str | Messages, settings: Mapping[str, Any], *, is_streaming: bool) -> dict[str, Any]:
    """Return a pipeline's inputs for one request of one row. The client or the pipeline converts and checks values.

    Raises:
        InputError: a setting is unknown.
    """
    inputs: dict[str, Any] = {"stream": [is_streaming]}
    if isinstance(prompt, str):
        inputs["text_input"] = [prompt]
    else:
        inputs["messages"] = [json.dumps([dict(each) for each in prompt])]
    for name, value in settings.items():
        if name not in Settings.__annotations__:
            raise InputError(f"Unknown setting {name!r}.", suggest(name, Settings.__annotations__))
        if name in _LISTS and value:
            inputs[name] = [[value] if isinstance(value, str) else [*value]]
        elif name not in _LISTS and value is not None:
            inputs[name] = [value]
    return inputs


def read_piece(answer: Mapping[str, Any]) -> Piece:
    """Convert an answer of the pipeline to a ``Piece``."""
    found = (np.asarray(answer[name]).item() for name in ("text_output", *Piece._fields[1:]))
    return Piece._make(value.decode() if isinstance(value, bytes) else value for value in found)


def check_end(last: Piece | None) -> None:
    """Raise ``ServerError`` if ``last`` is not the end of an answer."""
    if last is None or not last.finish_reason:
        raise ServerError("The answer ended before its last piece.", "The server's log says why; try again.")
