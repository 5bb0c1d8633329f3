"""Requests to models that turn texts into numbers, and to any model that answers once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.schema import Body, Count, Text


class Truncating(Body, kw_only=True):
    """Fields of requests whose texts may be too long: ``NONE`` refuses those, as with Cohere and NVIDIA's NIM."""

    truncate: Literal["END", "NONE"] | None = None


class EmbeddingsRequest(Truncating, kw_only=True):
    """Body of ``POST /v1/embeddings``."""

    input: Text | Annotated[list[Text], Meta(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None

    @property
    def texts(self) -> list[str]:
        """The texts to embed."""
        return [self.input] if isinstance(self.input, str) else self.input


class ClassifyRequest(Truncating, kw_only=True):
    """Body of ``POST /v1/classify``, as vLLM and NVIDIA Dynamo have it."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=2048)]

    @property
    def texts(self) -> list[str]:
        """The texts to classify."""
        return [self.input] if isinstance(self.input, str) else self.input


class Document(Struct, forbid_unknown_fields=True):
    """Document to rank."""

    text: str


class RerankRequest(Truncating, kw_only=True):
    """Body of ``POST /v1/rerank``, as Cohere, Jina, Voyage and vLLM have it; ``top_k`` is another name of ``top_n``."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=2048)]
    top_n: Count | None = None
    top_k: Count | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if None not in (self.top_n, self.top_k):
            raise ApiError("The request has top_n and top_k, which are the same. Leave one out.", "top_k")

    @property
    def texts(self) -> list[str]:
        """The documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(Truncating, kw_only=True):
    """Body of ``POST /v1/score``, as vLLM has it: one text with each of others, or as many of both."""

    text_1: str | Annotated[list[str], Meta(min_length=1, max_length=2048)]
    text_2: str | Annotated[list[str], Meta(min_length=1, max_length=2048)]

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The first and the second texts."""
        first, second = ([text] if isinstance(text, str) else text for text in (self.text_1, self.text_2))
        if len(first) not in (1, len(second)):
            raise ApiError(f"text_1 has {len(first)} texts and text_2 has {len(second)}.", "text_1")
        return first * (len(second) // len(first)), second


_Row = str | bool | int | float | list[Any] | dict[str, Any]
_Rows = Annotated[list[_Row], Meta(min_length=1, max_length=2**14)]


class PredictRequest(Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/models/NAME:predict``, of KServe's first protocol: rows as ``instances`` or ``inputs``.

    A row is values by input, or the value of a model's only one. A text alone is one row. ``inputs`` may also have all
    rows' values by input.
    """

    instances: _Rows | str | None = None
    inputs: _Rows | dict[str, _Rows] | str | None = None

    def __post_init__(self) -> None:
        if self.instances is None and self.inputs is None:
            raise ApiError("The request has no instances.", "instances", "missing_required_parameter")
        if self.instances is not None and self.inputs is not None:
            raise ApiError("The request has instances and inputs, which are the same. Leave one out.", "inputs")
        if isinstance(self.inputs, dict) and len({len(rows) for rows in self.inputs.values()}) != 1:
            raise ApiError("The inputs have different numbers of rows, or none.", "inputs")

    @property
    def field(self) -> str:
        """The field that has the rows."""
        return "instances" if self.inputs is None else "inputs"

    @property
    def rows(self) -> list[Any]:
        """The rows."""
        if isinstance(self.inputs, dict):
            return [dict(zip(self.inputs, row, strict=True)) for row in zip(*self.inputs.values(), strict=True)]
        rows = self.instances if self.inputs is None else self.inputs
        return [rows] if isinstance(rows, str) else rows or []
