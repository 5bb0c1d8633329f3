"""Description of OpenAI's API and its neighbours, as OpenAPI, from the types of requests and answers."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec

from shoal.serving.gateway.v1 import answers, messages, prediction_requests, responses, schema, tokens

MODEL = "{model}"  # in paths
_REFS = "#/components/schemas/{name}"
REF = _REFS.format(name="")


class Operation(NamedTuple):
    """Path that clients may ask, with the types of its request, of its answer and, if it may be one, of its events."""

    name: str
    path: str
    answer: Any
    request: type[msgspec.Struct] | None = None
    events: tuple[Any, ...] = ()

    @property
    def error(self) -> Any:
        """The type of a refusal."""
        return answers.MessageError if self.path.startswith("/v1/messages") else answers.Error


OPERATIONS = (
    Operation("Models", "/v1/models", answers.Models),
    Operation("Prediction", f"/v1/models/{MODEL}:predict", answers.Predictions, prediction_requests.PredictRequest),
    Operation("Model", f"/v1/models/{MODEL}", answers.Model),
    Operation("Chat completions", "/v1/chat/completions", answers.Chat, schema.ChatRequest, answers.CHAT_EVENTS),
    Operation("Completions", "/v1/completions", answers.Completion, schema.CompletionRequest, answers.TEXT_EVENTS),
    Operation("Responses", "/v1/responses", answers.Response, responses.ResponseRequest, answers.RESPONSE_EVENTS),
    Operation("Messages", "/v1/messages", answers.MessageAnswer, messages.MessageRequest, answers.MESSAGE_EVENTS),
    Operation("Numbers of tokens", "/v1/messages/count_tokens", answers.Count, messages.CountRequest),
    Operation("Embeddings", "/v1/embeddings", answers.Embeddings, prediction_requests.EmbeddingsRequest),
    Operation("Classification", "/v1/classify", answers.Classification, prediction_requests.ClassifyRequest),
    Operation("Ranking", "/v1/rerank", answers.Ranking, prediction_requests.RerankRequest),
    Operation("Ranking, by Cohere's second version", "/v2/rerank", answers.Ranking, prediction_requests.RerankRequest),
    Operation("Ranking, by vLLM's path", "/rerank", answers.Ranking, prediction_requests.RerankRequest),
    Operation("Scores", "/v1/score", answers.Scores, prediction_requests.ScoreRequest),
    Operation("Token ids", "/tokenize", answers.Tokens, tokens.TokenizeRequest),
    Operation("Texts of token ids", "/detokenize", answers.Text, tokens.DetokenizeRequest),
)


@cache
def describe() -> dict[str, Any]:
    """Return the description, an OpenAPI document, ready for JSON."""
    requests = [each.request for each in OPERATIONS if each.request]
    made = [kind for each in OPERATIONS for kind in (each.answer, each.error, *each.events)]
    _, taken = msgspec.json.schema_components(requests, ref_template=_REFS)
    _, given = msgspec.json.schema_components([*dict.fromkeys(made)], ref_template=_REFS)
    for component in taken.values():
        component["description"] = component["description"].replace("``", "`")
    for component in given.values():
        component["additionalProperties"] = False
    return {
        "openapi": "3.1.0",
        "info": {"title": "OpenAI's API and its neighbours, served by shoal", "version": "1"},
        "paths": {each.path: _describe(each) for each in OPERATIONS},
        "components": {
            "schemas": taken | given,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _describe(operation: Operation) -> dict[str, Any]:
    answered: dict[str, Any] = {"application/json": {"schema": _refer(operation.answer)}}
    if operation.events:  # the schema is that of each event's data, as in OpenAI's own document
        answered["text/event-stream"] = {"schema": {"anyOf": [*map(_refer, operation.events)]}}
    refused = {"description": "Refusal", "content": {"application/json": {"schema": _refer(operation.error)}}}
    found: dict[str, Any] = {
        "operationId": operation.name.lower().replace(" ", "_"),
        "summary": operation.name,
        "responses": {"200": {"description": "Answer", "content": answered}, "4XX": refused, "5XX": refused},
    }
    if MODEL in operation.path:
        place = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        found["parameters"] = [place]
    if operation.request is None:
        return {"get": found}
    content = {"application/json": {"schema": _refer(operation.request)}}
    return {"post": {**found, "requestBody": {"required": True, "content": content}}}


def _refer(kind: Any) -> dict[str, str]:
    return {"$ref": REF + kind.__name__}
