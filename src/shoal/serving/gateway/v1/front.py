"""Routes of OpenAI's API and its neighbours, on the HTTP port beside Triton's."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from shoal.authoring.repository.apis import Api, find_served, read_labels
from shoal.authoring.repository.call_graph import find_below, mark_decoupled
from shoal.authoring.repository.config import ModelConfig
from shoal.serving.gateway.callers.callers import Caller, Scope
from shoal.serving.gateway.callers.exposure import MOST_LISTED
from shoal.serving.gateway.core.gate import Gate
from shoal.serving.gateway.http.bodies import SMALL, join, read_body, work_apart
from shoal.serving.gateway.http.routes import Envelope, Route
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from shoal.serving.gateway.v1.answers import MessageError
from shoal.serving.gateway.v1.chat import answer_chat, answer_completion
from shoal.serving.gateway.v1.counts import find_texts
from shoal.serving.gateway.v1.document import MODEL, OPERATIONS, Operation, describe
from shoal.serving.gateway.v1.errors import ApiError, to_envelope
from shoal.serving.gateway.v1.messages import CountRequest, answer_message, to_anthropic
from shoal.serving.gateway.v1.model_request import COPIES, ModelRequest
from shoal.serving.gateway.v1.prediction_requests import ClassifyRequest, PredictRequest
from shoal.serving.gateway.v1.predictions import (
    answer_classify,
    answer_embeddings,
    answer_predict,
    answer_rerank,
    answer_score,
)
from shoal.serving.gateway.v1.responses import answer_response
from shoal.serving.gateway.v1.schema import MOST_BODY, FieldNames, decode
from shoal.serving.gateway.v1.sse import Json, to_response
from shoal.serving.gateway.v1.tokens import (
    DetokenizeRequest,
    Steps,
    TokenizeRequest,
    answer_detokenize,
    answer_tokenize,
    count_tokens,
    find_steps,
)

Handler = Callable[[Any, ModelRequest], Awaitable[web.StreamResponse]]
_COUNT = "/v1/messages/count_tokens"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # of the page
_FORM, _PAGES = "application/x-www-form-urlencoded", ("Origin", "Sec-Fetch-Site")  # headers of browsers
_OTHERS = "audio, images, files, batches, fine-tuning, stored answers and moderation are not served"


class ApiFront:
    """Handlers of the API; ``routes`` belong on the HTTP port."""

    def __init__(self, gate: Gate, configs: Mapping[str, ModelConfig], aliases: Mapping[str, str]) -> None:
        self._gate, self._specs, self._aliases = gate, {name: each.spec for name, each in configs.items()}, aliases
        marked = mark_decoupled(configs, configs.get)
        self._served = {name: find_served(each, marked) for name, each in marked.items()}
        below = find_below(configs)
        self._texts = {name: find_texts(name, served, configs, below) for name, served in self._served.items()}
        self._labels = {name: read_labels(configs[name], served) for name, served in self._served.items()}
        self._start = int(time.time())
        self._steps = {
            name: find_steps((name, *sorted(below[name])), configs)
            for name, served in self._served.items()
            if served.api is Api.LANGUAGE
        }

        def numbers(answer: Callable[..., Awaitable[web.Response]]) -> Handler:
            return lambda asked, model_request: answer(asked, model_request, self._texts[model_request.model])

        def classify(asked: ClassifyRequest, model_request: ModelRequest) -> Awaitable[web.Response]:
            return answer_classify(
                asked, model_request, self._texts[model_request.model], self._labels[model_request.model]
            )

        answers: dict[str, Handler] = {
            f"/v1/models/{MODEL}:predict": self._answer_predict,
            "/v1/chat/completions": answer_chat,
            "/v1/completions": answer_completion,
            "/v1/responses": answer_response,
            "/v1/messages": answer_message,
            _COUNT: self._answer_count,
            "/v1/embeddings": numbers(answer_embeddings),
            "/v1/classify": classify,
            "/v1/rerank": numbers(answer_rerank),
            "/v2/rerank": numbers(answer_rerank),
            "/rerank": numbers(answer_rerank),
            "/v1/score": numbers(answer_score),
            "/tokenize": self._answer_tokenize,
            "/detokenize": self._answer_detokenize,
        }
        read: dict[str, Callable[..., Awaitable[web.StreamResponse]]] = {
            "/v1/models": self._answer_models,
            f"/v1/models/{MODEL}": self._answer_model,
        }

        def make(operation: Operation) -> Route:
            path = operation.path.replace(MODEL, "(?P<model>[^/]+(?:/[^/]+)?)")  # hubs have names with a slash
            envelope: Envelope = to_anthropic if operation.error is MessageError else to_envelope
            if operation.request is None:
                return Route(operation.name, Scope.READ, path, read[operation.path], "GET", envelope)
            work = partial(self._answer, operation.request, answers[operation.path])
            return Route(operation.name, Scope.INFER, path, work, "POST", envelope)

        self.routes = [
            *map(make, OPERATIONS),
            Route("Description", Scope.OPEN, "/v1/openapi.json", self._answer_document, "GET", to_envelope),
            Route("Description", Scope.OPEN, "/v1/docs", self._answer_page, "GET", to_envelope),
            *(
                Route(f"{name}'s API", Scope.OPEN, path, self._refuse_path, "GET, POST, DELETE", envelope)
                for name, path, envelope in (
                    ("Anthropic", r"/v1/messages(/[\s\S]*)", to_anthropic),
                    ("OpenAI", r"/v1(/[\s\S]*)?", to_envelope),
                )
            ),
        ]

    async def _answer_document(self, *_: Any) -> web.Response:
        return to_response(describe())

    async def _answer_page(self, *_: Any) -> web.Response:
        from shoal.serving.gateway.v1.document_page import write_page

        return web.Response(text=write_page(), content_type="text/html", headers={"Content-Security-Policy": _POLICY})

    def say_place(self, path: str, caller: Caller) -> str:
        """Return what to send instead of a request for a path of another server; empty for other paths."""
        from shoal.serving.gateway.v1.elsewhere import say_place

        def list_models() -> dict[str, list[str]]:
            return {name: self._list_routes(name) for name in self._list_models(caller) if Scope.INFER in caller.scopes}

        return say_place(path[:100], list_models, lambda name: self._specs[self._aliases.get(name, name)])

    async def _refuse_path(self, request: web.Request, caller: Caller, *_: Any, **__: Any) -> web.Response:
        path = request.rel_url.raw_path[:100]
        known = [each.path for each in OPERATIONS if each.path.count("/") == path.rstrip("/").count("/")]
        near = get_close_matches(path.rstrip("/"), known, 1, 0.85)
        why = f". Did you mean {near[0]}?" if near else f": {_OTHERS}. GET / lists the paths."
        why = ": leave /v1 out of the client's base URL." if path.startswith("/v1/v1/") else why
        why = f". {place}" if (place := self.say_place(path, caller)) else why
        message = f"There is no path {path!r} here{why}"
        raise ApiError(message, code="unknown_url", reason=RefusalReason.ABSENT)

    # --- models ----------------------------------------------------------------------------------------------------

    async def _answer_models(self, _: web.Request, caller: Caller) -> web.Response:
        return to_response(
            {"object": "list", "data": [self._describe(name, caller) for name in self._list_models(caller)]}
        )

    async def _answer_model(self, _: web.Request, caller: Caller, model: str) -> web.Response:
        model = unquote(model)
        self._find(model, caller)
        return to_response(self._describe(model, caller))

    def _describe(self, name: str, caller: Caller) -> Json:
        model = self._aliases.get(name, name)
        head = {"id": name, "object": "model", "created": self._start, "owned_by": "shoal"}
        return {**head, "serves": self._list_routes(name), "ready": not self._gate.is_unready(model, caller)}

    def _list_routes(self, name: str) -> list[str]:
        """Return the paths that a model, or another name of it, serves."""
        model = self._aliases.get(name, name)
        served = self._served[model]
        steps = self._steps.get(model, Steps())
        more = [*([_COUNT, "/tokenize"] if steps.prompt else []), *(["/detokenize"] if steps.text else [])]
        predict = [] if self._gate.requests.is_decoupled(model) else [f"/v1/models/{name}:predict"]
        return [*served.paths, *more, *predict]

    def _list_models(self, caller: Caller) -> list[str]:
        """Return the names by which a caller may ask models: language models first, last those that serve nothing."""

        def place(name: str) -> tuple[bool, bool, str]:
            is_language = self._served[self._aliases.get(name, name)].api is Api.LANGUAGE
            return not self._list_routes(name), not is_language, name

        names = sorted([*self._served, *self._aliases], key=place)
        return [name for name in names if self._gate.exposure.is_exposed(self._aliases.get(name, name), caller)]

    def _say_models(self, caller: Caller) -> str:
        return f"Models: {', '.join(self._list_models(caller)[:MOST_LISTED]) or 'none'}."

    def _find(self, name: str, caller: Caller, path: str = "") -> str:
        """Return the model of a name, which serves ``path``, if that is given.

        Raises:
            RefusedError: there is no such model for the caller, or it serves something else.
        """
        model = self._aliases.get(name, name)
        try:
            self._gate.exposure.check_exposed(model, caller)
        except RefusedError as refused:
            code = "model_not_found" if refused.reason is RefusalReason.ABSENT else ""
            what = refused.message.rpartition(" Models: ")[0].replace(repr(model[:100]), repr(name[:100]))
            raise ApiError(f"{what} {self._say_models(caller)}", "model", code, refused.reason) from None
        if path and path not in (serves := self._list_routes(name)):
            raise ApiError(f"{name} does not serve {path}. It serves {', '.join(serves) or 'nothing'}.", "model")
        return model

    def _find_only(self, path: str, caller: Caller) -> str:
        """Return the only model that a caller may ask for ``path``. Raise ``ApiError`` if there is another number."""
        names = [name for name in self._list_models(caller) if path in self._list_routes(name)]
        if len(models := {self._aliases.get(name, name) for name in names}) != 1:
            what = f"The request has no model. {self._say_models(caller)}"
            raise ApiError(what, "model", "missing_required_parameter")
        return models.pop()

    # --- requests --------------------------------------------------------------------------------------------------

    async def _answer_count(self, asked: CountRequest, model_request: ModelRequest) -> web.Response:
        step = model_request.at(self._specs[self._steps[model_request.model].prompt])
        return to_response({"input_tokens": await count_tokens(asked.conversation, asked.variables, step)})

    async def _answer_tokenize(self, asked: TokenizeRequest, model_request: ModelRequest) -> web.Response:
        steps = self._steps[model_request.model]
        return await answer_tokenize(asked, model_request.at(self._specs[steps.prompt]), steps.context)

    async def _answer_detokenize(self, asked: DetokenizeRequest, model_request: ModelRequest) -> web.Response:
        return await answer_detokenize(asked, model_request.at(self._specs[self._steps[model_request.model].text]))

    async def _answer_predict(self, asked: PredictRequest, model_request: ModelRequest) -> web.Response:
        return await answer_predict(asked, model_request, self._specs[model_request.model])

    async def _answer(
        self, kind: type[Any], answer: Handler, request: web.Request, caller: Caller, model: str = ""
    ) -> web.StreamResponse:
        """Read a request of ``kind``, and answer it from the model that it names, or from ``model``."""
        # curl -d sends _FORM. So may a page of any origin, without a preflight, but its browser adds one of _PAGES.
        is_page = request.content_type != _FORM or any(name in request.headers for name in _PAGES)
        if request.content_type != "application/json" and is_page:
            what = f"Content-Type is {request.content_type[:60]!r}. Send application/json"
            raise RefusedError(RefusalReason.ENCODING, f"{what}: curl -H 'Content-Type: application/json' ...")
        with self._gate.reserve_memory(caller) as held:
            body = await join(await read_body(request, self._gate, held, MOST_BODY))
            if len(body) > SMALL:
                if (COPIES + 1) * len(body) > self._gate.traffic.memory.share:
                    what = f"The request has {len(body)} bytes, of which each takes {COPIES + 1} of memory"
                    raise RefusedError(
                        RefusalReason.LARGE, f"{what}: more than this server has for one client. Send less."
                    )
                self._gate.traffic.grow(held, COPIES * len(body))
            work = partial(decode, kind, body)
            asked = await work_apart(work, len(body))
            path = f"/v1/models/{unquote(model)}:predict" if model else request.rel_url.raw_path
            if not model:
                asked.model = asked.model or self._find_only(path, caller)
            found = self._find(unquote(model) or asked.model, caller, path)
            field_names = getattr(asked, "field_names", FieldNames(""))
            del body, work
            with self._gate.traffic.count_once(caller) as sender:  # whatever it is split into
                return await answer(
                    asked, ModelRequest(self._gate, request, sender, self._specs[found], held, field_names)
                )
