"""Paths of other servers, and examples of requests: what to send instead of a request that is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from shoal.authoring.repository.apis import BODIES, make_body
from shoal.clients.client.calls import find_text_input
from shoal.kit.component.spec import STRING, ModelSpec

_MOST = 64  # values of an input that are written out
_ANY, _CLASSIFY = "", "/v1/classify"
# Patterns of paths of TEI, Ollama, Cohere, Hugging Face, MLflow, TorchServe, SageMaker and others, by the path that
# does the same here. _ANY: whatever the model serves that the path names, or labels if there is a classifier.
_PLACES = {
    "/v1/embeddings": r"(/api|/v[12])?/embed(dings?)?|/embed_all|/pooling",
    "/v1/chat/completions": r"(/api|/v[12])?/chat(/completions)?",
    "/v1/completions": r"(/api)?/generate(_stream)?|/completions",
    "/v1/rerank": r"(/v[12])?/rerank(ers?)?",
    "/v1/score": r"/score|/similarity",
    _CLASSIFY: r"/classify",
    _ANY: r"/predict|/invocations|/(models|predictions)/(?P<model>.+?)(/invoke|[/:]predict)?",
}
_OTHERS = {
    "/metrics": "GET /metrics on the metrics port", "/infer": "POST /v2/models/NAME/infer",
    "/api/tags": "GET /v1/models", "/models": "GET /v1/models", "/ping": "GET /health",
}  # fmt: skip


def say_place(
    path: str, list_models: Callable[[], Mapping[str, Sequence[str]]], find_spec: Callable[[str], ModelSpec]
) -> str:
    """Return what to send instead of a request for a path of another server; empty for other paths.

    ``list_models`` returns the paths that the models serve which the caller may ask, by name.
    """
    path = path.rstrip("/")
    if path in _OTHERS:
        return f"Use {_OTHERS[path]}."
    matches = ((place, re.fullmatch(pattern, path)) for place, pattern in _PLACES.items())
    place, found = next((each for each in matches if each[1]), ("", None))
    if found is None:
        return ""
    serves = {name: paths for name, paths in list_models().items() if paths}
    able = [name for name, paths in serves.items() if (place or _CLASSIFY) in paths]
    named = found.groupdict().get("model")
    model = named if named in serves else next(iter(able or ([] if place else serves)), "NAME")
    place = place or serves.get(model, [f"/v1/models/{model}:predict"])[0]
    spec = find_spec(model) if model in serves else None
    body = json.dumps(make_body(place, model, spec)) if place in BODIES else '{"instances": ["A text."]}'
    if place not in BODIES and spec is not None:
        body = show_instances(spec)
    return f"Use POST {place}, with Content-Type: application/json, and send: {body}"


def show_instances(spec: ModelSpec) -> str:
    """Return an example of a body of ``:predict`` for a model."""
    if find_text_input(spec):
        return '{"instances": ["A text."]}'
    shown = [tensor for tensor in spec.inputs if not tensor.is_optional] or spec.inputs[:1]
    values = (f"{json.dumps(tensor.name)}: {_show_value(tensor.dtype, tensor.dims)}" for tensor in shown)
    return f'{{"instances": [{{{", ".join(values)}}}]}}'


def _show_value(dtype: str, dims: Sequence[int]) -> str:
    sizes = [2 if size == -1 else size for size in dims]
    value: Any = "text" if dtype == STRING else True if dtype == "TYPE_BOOL" else 1
    value = 0.5 if dtype.startswith(("TYPE_FP", "TYPE_BF")) else value
    if prod(sizes) > _MOST:
        return f"[{json.dumps(value)}, ...]"
    for size in [] if sizes == [1] else reversed(sizes):
        value = [value] * size
    return json.dumps(value)
