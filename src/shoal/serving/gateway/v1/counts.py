"""Numbers of tokens of texts, counted by the tokenizer that is a step of their pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

from shoal.authoring.repository.apis import Served
from shoal.authoring.repository.config import ModelConfig
from shoal.kit.component.parameters import Parameters
from shoal.kit.component.spec import ModelSpec
from shoal.serving.gateway.v1.errors import ApiError
from shoal.serving.gateway.v1.model_request import ModelRequest
from shoal.serving.gateway.v1.prediction_requests import Truncating

_MASK = "attention_mask"  # output of our tokenizers, of which 1 is a token
_MOST_NAMED = 3  # texts
MAX_LENGTH = 256  # that of tokens.py, which the service does not load


class Counter(NamedTuple):
    """Step that tokenizes a pipeline's texts: its ``inputs`` by those of the pipeline, and the most tokens of a row."""

    step: ModelSpec
    inputs: Mapping[str, str]
    most: int


class Texts(NamedTuple):
    """A pipeline that turns texts into numbers.

    ``counter`` is the step that counts their tokens, if it has one. Embeddings may be cut to ``dimensions``.
    """

    served: Served
    counter: Counter | None = None
    dimensions: Set[int] = frozenset()


def find_texts(
    name: str, served: Served, configs: Mapping[str, ModelConfig], below: Mapping[str, Collection[str]]
) -> Texts:
    """Return what is known of a model that serves texts; ``below`` are the models that each one calls."""
    steps = [configs[each] for each in (name, *below[name]) if each in configs]
    dimensions = {size for step in steps for size in step.dimensions}
    return Texts(served, _find_counter(configs[name], served, configs), dimensions)


def _find_counter(config: ModelConfig, served: Served, configs: Mapping[str, ModelConfig]) -> Counter | None:
    """Return the step of an ensemble that tokenizes its texts; None if no step gives an attention mask of them."""
    texts = {served.text, served.second} - {""}
    for step in config.steps:
        inputs = {given: own for own, given in step.inputs.items()}
        member = configs.get(step.model)
        if member is None or inputs.keys() != texts or not texts:
            continue
        masks = [tensor for tensor in member.spec.outputs if tensor.name == _MASK]
        if masks and member.spec.is_batched:
            size = masks[0].dims[0] if masks[0].dims[0] > 0 else MAX_LENGTH
            return Counter(member.spec, inputs, Parameters(member.spec).whole("max_length", size))
    return None


class Counted(NamedTuple):
    """Number of tokens that the model reads of a request's texts, and warnings about those that may be cut."""

    tokens: int = 0
    warnings: Sequence[str] = ()

    @property
    def members(self) -> dict[str, Any]:
        """Members of an answer."""
        usage = {"prompt_tokens": self.tokens, "total_tokens": self.tokens}
        return {"usage": usage, **({"warnings": [*self.warnings]} if self.warnings else {})}


async def count(
    counter: Counter, model_request: ModelRequest, values: Mapping[str, Any], asked: Truncating, field: str
) -> Counted:
    """Count the tokens of rows of texts, by the pipeline's inputs, which are those of the request's ``field``.

    Raises:
        RefusedError: ``truncate`` is ``NONE``, and a row may be cut.
    """
    step = model_request.at(counter.step)
    inputs = {counter.inputs[name]: texts for name, texts in values.items()}
    most, lengths = counter.step.max_batch_size, list[int]()
    for start in range(0, max(map(len, inputs.values())), most):  # each part of the rows has a width of its own
        part = {name: texts[start : start + most] for name, texts in inputs.items()}
        lengths += (await step.infer(part))[_MASK].sum(axis=1).tolist()
    cut = [f"{field}[{number}]" for number, length in enumerate(lengths) if length >= counter.most]
    if not cut:
        return Counted(sum(lengths))
    named = ", ".join(cut[:_MOST_NAMED]) + (f" and {len(cut) - _MOST_NAMED} more" if len(cut) > _MOST_NAMED else "")
    what = f"The model reads at most {counter.most} tokens of a row, and these have as many or more: {named}."
    if asked.truncate == "NONE":
        raise ApiError(f"{what} Shorten them, or leave truncate out.", cut[0])
    return Counted(sum(lengths), [what])
