"""Base of the components that continue token ids with an engine; it imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np

from shoal.errors import ArtifactError, InputError, ShoalError
from shoal.kit.component.context import Context
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import BATCH_INDEX, Arrays, ModelSpec
from shoal.kit.component.stream import QueueStream, Stream
from shoal.kit.component.streaming import StreamingComponent
from shoal.kit.generation.contract import (
    FOREIGN,
    INPUTS,
    LOG_PROB_OUTPUTS,
    LOG_PROBS,
    Limits,
    LogProbs,
    TokenRequest,
    read_streaming,
)
from shoal.kit.generation.guides import Guide, Guides
from shoal.kit.generation.row_batches import RowBatch, StreamedRowBatch, read_rows
from shoal.kit.generation.tokenizer import read_model_tokenizer
from shoal.kit.generation.weights import DECODER, Weights, find_weights, read_folder

AUTO = "auto"
WAYS = {"continuous": "continuous batches", "static": "static batches", "single": "one request at a time"}  # of llm-hf
_IDS = ("input_ids", "output_ids", "sequence_length")
_WARM = {"input_ids": 0, "input_lengths": 1, "request_output_len": 2}


class Engine(Protocol):
    """Language model that answers many requests from its own threads.

    The requests must be within ``limits``; ``settings`` are the names of the sampling settings that it applies.
    """

    limits: Limits
    settings: frozenset[str]

    def is_running(self) -> bool:
        """Whether the engine computes: not while it starts again after its thread or process died."""

    def admit(self, request: TokenRequest, stream: Stream) -> None:
        """Begin to answer a checked request, and return at once."""

    def close(self) -> None:
        """End all streams with an error, and stop computing."""


class EngineComponent(StreamingComponent):
    """Component that continues token ids with the engine that ``make_engine`` returns.

    All engines have the parameters ``model`` (the weights folder), ``slots`` (the number of requests computed at the
    same time) and ``context`` (the greatest number of tokens of a prompt and its answer). If ``model`` is empty and the
    version folder contains ``decoder.onnx``, the version folder is the weights folder.

    Requests may have several rows (see ``whole.py``). A decoupled model answers each row as its tokens come, and says
    which one in ``batch_index``; if ``streaming`` is false, and in a model that is not decoupled, one answer has all
    rows. The parameter ``exclude_input_in_output`` of the latter says whether answers are new tokens alone (true, the
    default) or begin with the prompt, as in FasterTransformer.

    With the parameter ``like_tensorrt_llm``, requests are read and answered as NVIDIA's backend tensorrtllm does it:
    ``streaming`` is false if it is left out, and a decoupled model answers each row by itself, also where rows are
    whole; whole answers may begin with the prompt.
    """

    answers_either_way = True
    optional_outputs = LOG_PROB_OUTPUTS
    library = "numpy"  # of the tensors; an engine that computes on GPUs has "engine"
    score: Callable[[Sequence[int], int], tuple[LogProbs, ...]] | None = None  # of prompts, if ``engine`` does not
    has_prompt = is_like_nvidia = _is_closing = False

    def make_engine(self, weights: Weights, limits: Limits) -> Engine:
        """Return the engine; its own limits are ``limits`` or narrower."""
        raise NotImplementedError

    def read_own(self, parameters: Parameters) -> None:
        """Read the parameters of this engine alone."""

    def read(self, context: Context) -> None:
        """Read parameters and the small files of the weights folder: this part of ``setup`` needs no engine."""
        parameters = Parameters(context.spec)
        self.read_own(parameters)
        slots = parameters.whole("slots", 16, most=1024)
        self.has_prompt = not parameters.flag("exclude_input_in_output", default=True)
        self.is_like_nvidia = parameters.flag("like_tensorrt_llm", default=False)
        if self.has_prompt and context.spec.is_decoupled and not self.is_like_nvidia:
            raise parameters.refusal(
                "exclude_input_in_output", "a model that is decoupled gives new tokens alone", "true"
            )
        self.ids = _check_tensors(context.spec)
        self.outputs = {tensor.name for tensor in context.spec.outputs}
        own = context.folder.absolute()
        self.weights = find_weights(read_folder(parameters, str(own) if (own / DECODER).is_file() else ""))
        length = parameters.whole("context", self.weights.context, most=self.weights.context)
        self.limits = Limits(self.weights.vocabulary, length, slots, self.weights.end_ids)

    def setup(self, context: Context) -> None:
        """Make the engine, and let it answer one request, so that late initialization delays no client."""
        self.read(context)
        weights = self.weights
        self._compilers, self._scorers = ThreadPoolExecutor(2, "shoal-guides"), ThreadPoolExecutor(1, "shoal-prompts")
        self.guides = Guides(lambda: read_model_tokenizer(weights.folder), weights.vocabulary, weights.end_ids)
        self.engine = self.make_engine(weights, self.limits)
        warm = QueueStream(self, 1)
        number = min(1, self.engine.limits.top_logprobs)
        asked = _WARM | {name: number for name, outputs in LOG_PROBS.items() if self.outputs & {*outputs}}
        self.open({name: np.array([[value]], self.ids) for name, value in asked.items()}, warm)
        list(warm)

    def open(self, inputs: Arrays, stream: Stream) -> None:
        """Check one request against the engine's limits and settings, and begin to answer it."""
        engine, spec = self.engine, self.context.spec
        if self.is_like_nvidia and "streaming" not in inputs:
            inputs = {**inputs, "streaming": np.zeros((len(inputs["input_ids"]), 1), np.bool_)}
        rows = read_rows(inputs, engine.limits, self.outputs, has_prompt=self.has_prompt)
        for row in rows:
            row.request.check_applied(engine.settings)
        # A row alone needs no joining: the engine itself answers it once if ``streaming`` is false.
        is_streaming = len(rows) == 1 or read_streaming([row.request.is_streaming for row in rows])
        if self.is_like_nvidia and not spec.is_decoupled and any(row.request.is_streaming for row in rows):
            raise InputError("Streaming is only supported in decoupled mode.", "Leave streaming out, or send false.")
        is_streaming = is_streaming or self.is_like_nvidia
        is_whole = not (spec.is_decoupled and is_streaming)
        if len(rows) > 1 and not is_whole and BATCH_INDEX not in {tensor.name for tensor in spec.outputs}:
            raise InputError(
                f"The request has {len(rows)} rows, and answers of model {spec.name} do not say which one they are to.",
                f"Send one row, or streaming false; or declare {BATCH_INDEX}, TYPE_INT32 [1], in its config.pbtxt.",
            )
        answers = (RowBatch if is_whole else StreamedRowBatch)(self, rows, stream)
        for row, each in zip(rows, answers.streams, strict=True):
            # one token at a time, so that a whole answer that is stopped has its tokens so far
            request = replace(row.request, is_streaming=True) if is_whole else row.request
            if self.score is not None and request.is_scored:
                self._scorers.submit(self._prepare, request, each)
            elif request.guide is not None:
                self._compilers.submit(self._prepare, request, each)
            else:
                engine.admit(request, each)

    def _prepare(self, request: TokenRequest, stream: Stream) -> None:
        """Compile the request's guide, or score its prompt, which may take seconds, and admit it."""
        if not stream.is_open:
            return
        try:
            if self._is_closing:  # many prompts may wait here, and each takes seconds
                raise ShoalError("The model is being unloaded.", "Ask again later.")
            if request.guide is not None:
                request = self._compile(request, request.guide)
            if self.score is not None and request.is_scored:
                places = self.score(request.ids, request.sampling.top_logprobs)
                request = replace(request, prompt_places=places)
            self.engine.admit(request, stream)
        except Exception as error:  # which the component puts into words for the client, without paths
            stream.end(error)

    def _compile(self, request: TokenRequest, guide: Guide) -> TokenRequest:
        try:
            return replace(request, follower=self.guides.follow(guide))
        except InputError:
            if not guide.is_optional:
                raise
            return replace(request, guide=None)

    def is_ready(self) -> bool:
        """Whether the engine computes."""
        return self.engine.is_running()

    def close(self) -> None:
        """Close the engine."""
        self._is_closing = True
        for pool in (self._compilers, self._scorers):
            pool.shutdown()  # each request that waits for it is ended
        self.engine.close()


def _check_tensors(spec: ModelSpec) -> Any:
    """Check the declared inputs, and return the dtype of token ids, INT32 or UINT32, which all tensors of ids have."""
    foreign = [tensor.name for tensor in spec.outputs if tensor.name in FOREIGN and tensor.name not in _IDS]
    if unknown := [tensor.name for tensor in spec.inputs if tensor.name not in INPUTS] + foreign:
        name, kind = unknown[0], "output" if unknown[0] in foreign else "input"
        near = "".join(f" Did you mean {each}?" for each in get_close_matches(name, INPUTS, 1))
        why = f": {FOREIGN[name]}." if name in FOREIGN else f", which engines do not read.{near}"
        raise ArtifactError(
            f"Model {spec.name} declares the {kind} {name}{why}",
            "Remove it from config.pbtxt, so that clients learn that it has no effect.",
        )
    found = {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs) if tensor.name in _IDS}
    if len(set(found.values())) != 1 or not set(found.values()) <= {"TYPE_INT32", "TYPE_UINT32"}:
        kinds = ", ".join(f"{name} {dtype.removeprefix('TYPE_')}" for name, dtype in found.items())
        raise ArtifactError(f"Token ids of model {spec.name} are {kinds}.", "Declare all of them INT32, or all UINT32.")
    return np.int32 if "TYPE_INT32" in found.values() else np.uint32
