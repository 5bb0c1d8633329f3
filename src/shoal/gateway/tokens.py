"""Counts of tokens, from answers of models that report them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.component.spec import ModelSpec

_KINDS = {"num_input_tokens": "input", "num_output_tokens": "output"}  # by the output that counts them
KINDS = tuple(_KINDS.values())


class Meter:
    """Counts the tokens of one request as its answers come: each has the numbers of tokens so far."""

    def __init__(self, counts: Counter[tuple[str, str]], model: str) -> None:
        self._counts, self._model = counts, model
        self._known = dict.fromkeys(_KINDS, 0)

    def read(self, answer: Any) -> None:
        """Count what a ``ModelInferResponse`` adds."""
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=False):
            if output.name in _KINDS and len(raw) == 4:
                number = int.from_bytes(raw, "little")
                self._counts[self._model, _KINDS[output.name]] += max(0, number - self._known[output.name])
                self._known[output.name] = max(number, self._known[output.name])


class Tokens:
    """Sums of ``input`` and ``output`` tokens by model, of those models that declare both counts, UINT32 ``[1]``."""

    def __init__(self, specs: Iterable[ModelSpec]) -> None:
        self._models = {spec.name for spec in specs if _declares_tokens(spec)}
        self.counts: Counter[tuple[str, str]] = Counter()

    @property
    def models(self) -> list[str]:
        """Names of these models."""
        return sorted(self._models)

    def meter(self, model: str) -> Meter | None:
        """Return a meter for one request; None if the model does not report tokens."""
        return Meter(self.counts, model) if model in self._models else None


def _declares_tokens(spec: ModelSpec) -> bool:
    declared: Mapping[str, Any] = {tensor.name: (tensor.dtype, tensor.dims) for tensor in spec.outputs}
    return all(declared.get(name) == ("TYPE_UINT32", (1,)) for name in _KINDS)
