"""Clients of language models: texts or chats in, text out, from a server or from a pipeline in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from typing import Any, NamedTuple, Protocol, TypedDict, Unpack

from shoal.clients.client.aio import AsyncClient
from shoal.clients.client.client import Client
from shoal.clients.llm.dialects import Dialect, Prompt, find_dialect
from shoal.errors import InputError, suggest
from shoal.kit.component.spec import TensorSpec
from shoal.kit.generation.pieces import Piece, join_pieces

_AT_ONCE = 16  # requests of ``generate_all``: an engine's default slots


class GenerationSettings(TypedDict, total=False):
    """Settings of one request; for a setting that is left out, the model's default applies.

    ``shoal.kit.generation.sampling`` has their meaning and their limits.
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
    top_logprobs: int
    echo: bool
    stop_words: Sequence[str]
    bad_words: Sequence[str]
    guide: Mapping[str, Any]
    # end of settings
    return_cumulative_logprob: bool
    return_logprobs: bool
    chat_template_kwargs: Mapping[str, Any]


class StreamingPipeline(Protocol):
    """Interface of a pipeline in this process; ``shoal.Pipeline`` has it."""

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Inputs of a request."""

    def stream(self, **inputs: Any) -> Generator[Mapping[str, Any]]:
        """Yield the answers to one request."""


class Question(NamedTuple):
    """One request: its prompt and settings; and its time-outs in seconds and its id, which only servers have."""

    prompt: Prompt
    settings: Mapping[str, Any]
    is_streaming: bool
    timeout: float | None
    between: float | None
    request_id: str

    def to_inputs(self, dialect: Dialect) -> dict[str, Any]:
        """Return the inputs in a model's dialect."""
        return dialect.to_inputs(self.prompt, self.settings, is_streaming=self.is_streaming)

    def for_server(self) -> dict[str, Any]:
        """Return the options of ``Client.stream``."""
        return {"timeout": self.timeout, "between": self.between, "request_id": self.request_id}

    def check_local(self) -> None:
        """Raise ``InputError`` if there is a time-out or an id, because a pipeline in this process would ignore it."""
        if given := next((name for name, value in self.for_server().items() if value), None):
            raise InputError(f"{given} is given, and the pipeline runs in this process.", "Leave it out.")


class Llm:
    """Language model on a server, through a ``Client``, or in this process, as a ``Pipeline`` of ``shoal.load``::

        with shoal.Client("127.0.0.1:8001") as client:
            print(Llm(client).generate("Once upon a time", max_tokens=20).text)
            for piece in Llm(client).stream([{"role": "user", "content": "Hello"}]):
                print(piece.text, end="")

    A prompt is a text, or a list of messages that the model's chat template turns into a text. Without ``model``, the
    server's default model is asked. The model has the tensors of ``llm``, of ``llamav2`` (one whole answer, without
    reason and counts), of NVIDIA's vLLM backend (texts alone), or of TensorRT-LLM's ``ensemble`` and
    ``tensorrt_llm_bls`` (texts alone, ``max_tokens`` needed, answers without reason).
    """

    def __init__(self, source: Client | StreamingPipeline, model: str = "") -> None:
        if isinstance(source, str):
            raise InputError(f"{source!r} is no client.", f"Give one: Llm(shoal.Client({source!r}))")
        self._source = source
        self._model = model or (source.default_model() if isinstance(source, Client) else "")

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **settings: Unpack[GenerationSettings],
    ) -> Piece:
        """Return the whole answer to ``prompt``, a text, a chat or token ids; ``timeout`` is in seconds.

        ``request_id`` names the request on a server: in its log, and in a request with ``stop`` that ends it.

        Raises:
            InputError: the prompt or a setting is refused.
            ServerError: there was no complete answer, or not in time.
        """
        _check_settings(settings)
        question = Question(prompt, settings, False, timeout, None, request_id)
        with closing(self._ask(question)) as pieces:
            return join_pieces([*pieces])

    def generate_all(
        self, prompts: Sequence[Prompt], *, timeout: float | None = None, **settings: Unpack[GenerationSettings]
    ) -> list[Piece]:
        """Return the whole answers to several prompts, in their order: requests of their own, 16 at a time.

        Raises:
            InputError, ServerError: as in ``generate``, of the first prompt that fails; no further ones are begun.
        """
        with ThreadPoolExecutor(_AT_ONCE, "shoal-llm") as pool:
            return [*pool.map(lambda prompt: self.generate(prompt, timeout=timeout, **settings), prompts)]

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        between: float | None = None,
        request_id: str = "",
        **settings: Unpack[GenerationSettings],
    ) -> Generator[Piece]:
        """Stream the answer to ``prompt``; to stop the model before the end, close the generator.

        ``timeout`` is the greatest number of seconds to the first piece, ``between`` from each piece to the next;
        ``request_id`` is as in ``generate``.

        Raises:
            InputError, ServerError: as in ``generate``; ``ServerError`` also after some pieces.
        """
        _check_settings(settings)
        return self._ask(Question(prompt, settings, True, timeout, between, request_id))

    def _ask(self, question: Question) -> Generator[Piece]:
        answers: Any
        if isinstance(self._source, Client):
            dialect = find_dialect(self._source.describe(self._model).inputs)
            answers = self._source.stream(self._model, question.to_inputs(dialect), **question.for_server())
        else:
            question.check_local()
            dialect = find_dialect(self._source.inputs)
            answers = self._source.stream(**question.to_inputs(dialect))
        last = None
        with closing(answers):
            for answer in answers:
                last = dialect.read(answer)
                yield last
        dialect.check_end(last)


class AsyncLlm:
    """Language model behind an ``AsyncClient``, or in this process in threads; see ``Llm``."""

    def __init__(self, source: AsyncClient | StreamingPipeline, model: str = "") -> None:
        self._source, self._model = source, model

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **settings: Unpack[GenerationSettings],
    ) -> Piece:
        """Return the whole answer; see ``Llm.generate``."""
        _check_settings(settings)
        question = Question(prompt, settings, False, timeout, None, request_id)
        return join_pieces([piece async for piece in self._ask(question)])

    async def generate_all(
        self, prompts: Sequence[Prompt], *, timeout: float | None = None, **settings: Unpack[GenerationSettings]
    ) -> list[Piece]:
        """Return the whole answers to several prompts; see ``Llm.generate_all``."""
        places = asyncio.Semaphore(_AT_ONCE)

        async def ask(prompt: Prompt) -> Piece:
            async with places:
                return await self.generate(prompt, timeout=timeout, **settings)

        tasks = [asyncio.ensure_future(ask(prompt)) for prompt in prompts]
        try:
            return [*await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        between: float | None = None,
        request_id: str = "",
        **settings: Unpack[GenerationSettings],
    ) -> AsyncGenerator[Piece]:
        """Stream the answer; see ``Llm.stream``."""
        _check_settings(settings)
        return self._ask(Question(prompt, settings, True, timeout, between, request_id))

    async def _ask(self, question: Question) -> AsyncGenerator[Piece]:
        opened: Any
        if isinstance(self._source, AsyncClient):
            self._model = self._model or await self._source.default_model()
            dialect = find_dialect((await self._source.describe(self._model)).inputs)
            inputs = question.to_inputs(dialect)
            opened = self._source.stream(self._model, inputs, **question.for_server())
        else:
            question.check_local()
            dialect = find_dialect(self._source.inputs)
            opened = aclosing(_in_threads(self._source.stream(**question.to_inputs(dialect))))
        last = None
        async with opened as answers:
            async for answer in answers:
                last = dialect.read(answer)
                yield last
        dialect.check_end(last)


async def _in_threads(answers: Generator[Any]) -> AsyncGenerator[Any]:
    """Yield what a generator yields; it runs in threads."""
    try:
        while (answer := await asyncio.to_thread(next, answers, None)) is not None:
            yield answer
    finally:
        await asyncio.shield(asyncio.to_thread(_close, answers))


def _close(answers: Generator[Any]) -> None:
    """Close a generator; if another thread still waits in it for an answer, after that one."""
    while True:
        try:
            return answers.close()
        except ValueError:  # it is running: the task that asked for an answer was cancelled
            time.sleep(0.01)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ``InputError`` if a setting is unknown."""
    for name in settings:
        if name not in GenerationSettings.__annotations__:
            raise InputError(f"Unknown setting {name!r}.", suggest(name, GenerationSettings.__annotations__))
