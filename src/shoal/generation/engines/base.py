"""Base of the components that continue token ids with an engine; it imports neither torch nor transformers."""

from __future__ import annotations

from typing import Protocol

from shoal.component import Arrays, Context, Parameters, Stream, StreamingComponent
from shoal.component.streaming import QueueStream
from shoal.generation.contract import Limits, TokenRequest
from shoal.generation.weights import DECODER, Weights, find_weights, read_folder


class Engine(Protocol):
    """Language model that answers many requests from its own threads.

    The requests must be within ``limits``; ``settings`` are the names of the sampling settings that it applies.
    """

    limits: Limits
    settings: frozenset[str]

    def admit(self, request: TokenRequest, stream: Stream) -> None:
        """Begin to answer a checked request, and return at once."""

    def close(self) -> None:
        """End all streams with an error, and stop computing."""


class EngineComponent(StreamingComponent):
    """Component that continues token ids with the engine that ``make_engine`` returns.

    All engines have the parameters ``model`` (the weights folder), ``slots`` (the number of requests computed at the
    same time) and ``context`` (the greatest number of tokens of a prompt and its answer). If ``model`` is empty and the
    version folder contains ``decoder.onnx``, the version folder is the weights folder.
    """

    def make_engine(self, weights: Weights, limits: Limits, parameters: Parameters) -> Engine:
        """Return the engine; its own limits are ``limits`` or narrower."""
        raise NotImplementedError

    def setup(self, context: Context) -> None:
        """Make the engine, and let it answer one request, so that late initialization delays no client."""
        parameters = Parameters(context.spec)
        own = context.folder.absolute()
        weights = find_weights(read_folder(parameters, str(own) if (own / DECODER).is_file() else ""))
        length = parameters.whole("context", weights.context, most=weights.context)
        limits = Limits(weights.vocabulary, length, parameters.whole("slots", 16, most=1024), weights.end_ids)
        self.engine = self.make_engine(weights, limits, parameters)
        warm = QueueStream(self, 1)
        self.engine.admit(TokenRequest((0,), 2), warm)
        list(warm)

    def open(self, inputs: Arrays, stream: Stream) -> None:
        """Check one request against the engine's limits and settings, and begin to answer it."""
        request = TokenRequest.read(inputs, self.engine.limits)
        request.sampling.check_applied(self.engine.settings)
        self.engine.admit(request, stream)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
