"""Routes of OpenAI's API and its neighbours, on the HTTP port beside Triton's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from shoal.client.calls import find_text_input
from shoal.gateway.core.bodies import read_body
from shoal.gateway.core.callers import Caller, Scope
from shoal.gateway.core.gate import Gate
from shoal.gateway.core.refusals import RefusedError, Why
from shoal.gateway.core.routes import Route
from shoal.gateway.core.upstream import join
from shoal.gateway.v1.ask import Asker
from shoal.gateway.v1.chat import answer_chat, answer_completion
from shoal.gateway.v1.errors import ApiError, to_envelope
from shoal.gateway.v1.schema import (
    MOST_BODY,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingsRequest,
    PredictRequest,
    decode,
)
from shoal.gateway.v1.tables import answer_classify, answer_embeddings, answer_predict
from shoal.gateway.v1.writing import Json, to_response
from shoal.gateway.v2.screening import SMALL
from shoal.repository.apis import Api, Served, find_served
from shoal.repository.config import ModelConfig

_ROUTES = {  # by what a model serves
    Api.LANGUAGE: ("/v1/completions",), Api.EMBEDDINGS: ("/v1/embeddings",), Api.CLASSIFY: ("/v1/classify",),
    Api.NONE: (),
}  # fmt: skip
_OTHERS = "audio, images, files, batches, fine-tuning, stored answers and moderation are not served"


class ApiFront:
    """Handlers of the API; ``routes`` belong on the HTTP port."""

    def __init__(self, gate: Gate, configs: Mapping[str, ModelConfig], aliases: Mapping[str, str]) -> None:
        self._gate, self._specs, self._aliases = gate, {name: each.spec for name, each in configs.items()}, aliases
        self._served = {name: find_served(config) for name, config in configs.items()}
        self._start = int(time.time())
        infer, read = Scope.INFER, Scope.READ

        def post(name: str, path: str, answer: Callable[..., Awaitable[Any]]) -> Route:
            return Route(name, infer, path, answer, "POST", to_envelope)

        self.routes = [
            Route("Models", read, "/v1/models", self._answer_models, "GET", to_envelope),
            Route("Models", read, "/v1/models/(?P<model>[^/:]+)", self._answer_model, "GET", to_envelope),
            post("Prediction", "/v1/models/(?P<model>[^/:]+):predict", self._answer_predict),
            post("Chat completions", "/v1/chat/completions", self._answer_chat),
            post("Completions", "/v1/completions", self._answer_completion),
            post("Embeddings", "/v1/embeddings", self._answer_embeddings),
            post("Classification", "/v1/classify", self._answer_classify),
            Route("OpenAI's API", Scope.OPEN, "/v1/(?P<rest>.*)", self._refuse_path, "GET, POST, DELETE", to_envelope),
        ]

    async def _refuse_path(self, request: web.Request, *_: Any, **__: Any) -> web.Response:
        path = request.rel_url.raw_path[:100]
        raise ApiError(f"There is no path {path!r} here: {_OTHERS}.", code="unknown_url", why=Why.ABSENT)

    # --- models ----------------------------------------------------------------------------------------------------

    async def _answer_models(self, _: web.Request, caller: Caller) -> web.Response:
        names = [*self._served, *self._aliases]
        models = [self._describe(name, caller) for name in sorted(names) if self._is_exposed(name, caller)]
        return to_response({"object": "list", "data": models})

    async def _answer_model(self, _: web.Request, caller: Caller, model: str) -> web.Response:
        self._find(model, caller)
        return to_response(self._describe(model, caller))

    def _describe(self, name: str, caller: Caller) -> Json:
        model = self._aliases.get(name, name)
        return {
            "id": name, "object": "model", "created": self._start, "owned_by": "shoal",
            "serves": self._list_routes(model), "ready": not self._gate.is_unready(model, caller),
        }  # fmt: skip

    def _list_routes(self, model: str) -> list[str]:
        served = self._served[model]
        chat = ["/v1/chat/completions"] if served.takes_chats else []
        predict = [] if self._gate.requests.is_decoupled(model) else [f"/v1/models/{model}:predict"]
        return [*chat, *_ROUTES[served.api], *predict]

    def _is_exposed(self, name: str, caller: Caller) -> bool:
        return self._gate.exposure.is_exposed(self._aliases.get(name, name), caller)

    def _find(self, name: str, caller: Caller, path: str = "") -> str:
        """Return the model of a name, which serves ``path``, if that is given.

        Raises:
            RefusedError: there is no such model for the caller, or it serves something else.
        """
        model = self._aliases.get(name, name)
        try:
            self._gate.exposure.check_exposed(model, caller)
        except RefusedError as refused:
            code = "model_not_found" if refused.why is Why.ABSENT else ""
            raise ApiError(refused.message, "model", code, refused.why) from None
        if path and path not in (serves := self._list_routes(model)):
            raise ApiError(f"{name} does not serve {path}. It serves {' and '.join(serves) or 'nothing'}.", "model")
        return model

    # --- requests --------------------------------------------------------------------------------------------------

    async def _answer_chat(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        async def answer(asked: ChatRequest, asker: Asker, *_: Any) -> web.StreamResponse:
            return await answer_chat(request, asked, asker)

        return await self._answer(request, caller, ChatRequest, answer)

    async def _answer_completion(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        async def answer(asked: CompletionRequest, asker: Asker, *_: Any) -> web.StreamResponse:
            return await answer_completion(request, asked, asker)

        return await self._answer(request, caller, CompletionRequest, answer)

    async def _answer_embeddings(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        return await self._answer(request, caller, EmbeddingsRequest, answer_embeddings)

    async def _answer_classify(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        return await self._answer(request, caller, ClassifyRequest, answer_classify)

    async def _answer_predict(self, request: web.Request, caller: Caller, model: str) -> web.StreamResponse:
        name = self._find(model, caller, f"/v1/models/{self._aliases.get(model, model)}:predict")
        spec = self._specs[name]

        async def answer(asked: PredictRequest, asker: Asker, _: Served) -> web.StreamResponse:
            return await answer_predict(asked, asker, spec, find_text_input(spec))

        return await self._answer(request, caller, PredictRequest, answer, name)

    async def _answer(
        self,
        request: web.Request,
        caller: Caller,
        kind: type[Any],
        answer: Callable[..., Awaitable[web.StreamResponse]],
        model: str = "",
    ) -> web.StreamResponse:
        """Read a request of ``kind``, and answer it from the model that it names, or from ``model``."""
        if request.content_type != "application/json":
            raise RefusedError(Why.ENCODING, f"Content-Type is {request.content_type[:60]!r}. Send application/json.")
        with self._gate.reserve_memory(caller) as held:
            body = await join(await read_body(request, self._gate, held, MOST_BODY))
            work = partial(decode, kind, body)
            asked = await asyncio.to_thread(work) if len(body) > SMALL else work()
            model = model or self._find(asked.model, caller, request.rel_url.raw_path)
            asker = Asker(self._gate, request, caller, self._specs[model], len(body))
            del body, work
            return await answer(asked, asker, self._served[model])
