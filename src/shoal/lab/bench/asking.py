"""Requests of a benchmark to models that make tokens: texts or token ids in, pieces with counts of tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np

from shoal.clients.llm.dialects import find_dialect
from shoal.errors import InputError, ServerError
from shoal.kit.component.spec import ModelSpec, TensorSpec
from shoal.kit.generation.pieces import Piece
from shoal.lab.bench.measure import Pool
from shoal.lab.bench.openai import OpenAi
from shoal.lab.bench.target import BenchTarget

Prompt: TypeAlias = str | Sequence[int]
Count: TypeAlias = Callable[[str], int]  # tokens of a text

_TEXTS_IN, _TEXTS_OUT = {"text_input", "prompt"}, {"text_output", "generated_text"}
_LENGTHS = {"max_tokens", "sampling_parameters"}  # inputs that limit an answer
_IDS = {"input_ids", "request_output_len"}
_GREEDY = {"runtime_top_k": 1, "runtime_top_p": 1.0, "temperature": 1.0}  # where they are declared


def takes_ids(spec: ModelSpec | None) -> bool:
    """Whether a model takes token ids, as NVIDIA's engines do."""
    return spec is not None and _names(spec.inputs) >= _IDS


def takes_prompts(spec: ModelSpec | None, *, has_tokenizer: bool) -> bool:
    """Whether a model is measured in tokens of texts: its answers have a wanted length, or a tokenizer counts them."""
    if spec is None:  # of OpenAI's API
        return True
    inputs, outputs = _names(spec.inputs), _names(spec.outputs)
    return bool(inputs & _TEXTS_IN and outputs & _TEXTS_OUT and (inputs & _LENGTHS or has_tokenizer))


def sets_length(spec: ModelSpec | None) -> bool:
    """Whether a request says how long the answer is."""
    return spec is None or takes_ids(spec) or bool(_names(spec.inputs) & _LENGTHS)


def _names(tensors: Iterable[TensorSpec]) -> set[str]:
    return {tensor.name for tensor in tensors}


class Asker(ABC):
    """Way to ask one model. ``most_rows`` is how many prompts a request may have. Threads may share it."""

    most_rows = 1

    @abstractmethod
    def ask(self, prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Piece]:
        """Yield the pieces of the answers to one request, with counts over all prompts where the server gives them.

        Every answer has ``max_tokens`` tokens, if the model has a setting for that; with 0, as many as it makes.

        Raises:
            InputError, ServerError: the request is refused, or the answer ends early.
        """

    def prepare(self, number: int) -> None:  # noqa: B027 - most open connections as they need them
        """Open connections for ``number`` callers."""

    def recover(self) -> None:  # noqa: B027 - OpenAI's API does not say it
        """Wait until the server is ready again."""


def make_asker(target: BenchTarget, count: Count | None, held: ExitStack) -> Asker:
    """Return the way to ask a target, whose server and connections end with ``held``."""
    endpoint = target.open(held)
    if target.spec is None:
        model = OpenAi(endpoint.url, target.name, endpoint.access)
        held.callback(model.close)
        return _OpenAiAsker(model)
    pool = Pool(endpoint.url, target.servers.protocol, **endpoint.access)
    held.callback(pool.close)
    pool.connect(1, [target.name])
    if takes_ids(target.spec):
        return _Ids(pool, target.spec)
    return _Texts(pool, target.spec, count)


class _OpenAiAsker(Asker):
    def __init__(self, model: OpenAi) -> None:
        self._model = model

    def ask(self, prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Piece]:
        (prompt,) = prompts
        assert isinstance(prompt, str)
        return self._model.stream(prompt, max_tokens)


class _OfTriton(Asker):
    def __init__(self, pool: Pool, spec: ModelSpec) -> None:
        self._pool, self._spec, self._inputs = pool, spec, _names(spec.inputs)
        self._streams = spec.is_decoupled or "stream" in self._inputs
        self.most_rows = max(1, 1 if self._streams else spec.max_batch_size)

    def prepare(self, number: int) -> None:
        self._pool.connect(number, [self._spec.name])

    def recover(self) -> None:
        self._pool.wait_ready(self._spec.name)


class _Texts(_OfTriton):
    """Models with the tensors of ``llm``, ``llamav2``, NVIDIA's vLLM backend, or TensorRT-LLM's front."""

    def __init__(self, pool: Pool, spec: ModelSpec, count: Count | None) -> None:
        super().__init__(pool, spec)
        self._count = count
        self._is_exact = bool(self._inputs & {"min_tokens", "sampling_parameters", "min_length"})

    def ask(self, prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Piece]:
        dialect, settings = find_dialect(self._spec.inputs), self._settings(max_tokens)
        rows = [dialect.to_inputs(text, settings, is_streaming=self._streams) for text in prompts]
        inputs = {name: [value for row in rows for value in row[name]] for name in rows[0]}
        with self._pool.take() as client:
            if not self._streams:
                yield self._read_whole(client.infer(self._spec.name, inputs), max_tokens if self._is_exact else 0)
                return
            last = None
            for answer in client.stream(self._spec.name, inputs):
                last = dialect.read(answer)
                yield last
            dialect.check_end(last)
            if last and not last.num_output_tokens and self._is_exact:
                yield last._replace(text="", num_output_tokens=max_tokens)

    def _settings(self, max_tokens: int) -> dict[str, Any]:
        """Return the settings for greedy answers of one length, as far as the model has them."""
        if not max_tokens:
            return {}
        wanted: dict[str, Any] = {"max_tokens": max_tokens, "min_tokens": max_tokens, "temperature": 0.0}
        if "sampling_parameters" in self._inputs:
            return wanted
        if "beam_width" in self._inputs:  # TensorRT-LLM's are greedy without a temperature
            wanted = {"max_tokens": max_tokens, **({"min_tokens": max_tokens} if "min_length" in self._inputs else {})}
        return {name: value for name, value in wanted.items() if name in self._inputs or "beam_width" in self._inputs}

    def _read_whole(self, answer: Mapping[str, Any], length: int) -> Piece:
        """Read answers which have ``length`` tokens each; 0 if that is not known."""
        texts = [text.decode(errors="replace") for text in np.ravel(answer[min(_TEXTS_OUT & {*answer})])]
        counts = [
            int(np.sum(answer[name])) if name in answer else 0 for name in ("num_input_tokens", "num_output_tokens")
        ]
        if not counts[1]:  # tokens of an answer may not be those of its text
            counts[1] = length * len(texts) or (sum(map(self._count, texts)) if self._count else 0)
        return Piece("\n".join(texts), "stop", counts[0], counts[1])


class _Ids(_OfTriton):
    """Engines: token ids in, token ids out, as FasterTransformer and TensorRT-LLM have them."""

    def __init__(self, pool: Pool, spec: ModelSpec) -> None:
        super().__init__(pool, spec)
        known = {*_IDS, "input_lengths", *_GREEDY}
        if missing := [t.name for t in spec.inputs if not t.is_optional and t.name not in known]:
            raise InputError(f"{spec.name} needs the input {missing[0]}, which a benchmark does not know.")

    def ask(self, prompts: Sequence[Prompt], max_tokens: int) -> Iterator[Piece]:
        rows, total = len(prompts), sum(map(len, prompts))
        lengths = {"input_lengths": [[len(ids)] for ids in prompts], "request_output_len": [[max_tokens]] * rows}
        fixed = {name: [[value]] * rows for name, value in _GREEDY.items()}
        fixed |= {name: [[max_tokens]] * rows for name in ("min_tokens", "min_length")}
        given = {"input_ids": [list(ids) for ids in prompts], **lengths, **fixed}
        inputs = {name: value for name, value in given.items() if name in self._inputs}
        done, prompt_in_answer = 0, total
        with self._pool.take() as client:
            is_decoupled, name = self._spec.is_decoupled, self._spec.name
            for answer in client.stream(name, inputs) if is_decoupled else [client.infer(name, inputs)]:
                found = np.asarray(answer["output_ids"]).reshape(rows, -1, np.shape(answer["output_ids"])[-1])[:, 0]
                ends = np.reshape(answer.get("sequence_length", [found.shape[1]] * rows), (rows, -1))[:, 0]
                if any(list(row[: len(ids)]) != list(ids) for row, ids in zip(found, prompts, strict=True)):
                    prompt_in_answer = 0
                done += int(np.sum(ends)) - prompt_in_answer
                prompt_in_answer = 0
                yield Piece(" ".join(map(str, found.ravel())), "", total, done)
        if done <= 0:
            raise ServerError(f"{self._spec.name} gave no tokens.")
