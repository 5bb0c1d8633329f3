"""Choice of the way of batching for a transformers model: the first way whose tokens are those of ``generate``.

transformers computes some families of models wrongly, without an error, in continuous batches or beside rows with
padding. So each way answers a few prompts before a client does, and the next way is taken if a token is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig
from transformers import __version__ as version

from shoal.component import Component
from shoal.component.streaming import QueueStream
from shoal.errors import ArtifactError, ShoalError
from shoal.generation.contract import Limits, TokenRequest
from shoal.generation.engines.hf import HfEngine
from shoal.generation.engines.hf_static import HfStaticEngine
from shoal.generation.sampling import Sampling

_SIZES = ((1, 3, 9, 24), 8)  # tokens per prompt, and new tokens
_LARGE_SIZES = ((1, 3, 9), 3)  # of a model that needs a second for a token
_LARGE = 1_000_000_000  # weights
_MOST_WORK = 100_000_000_000  # weights times tokens of a prompt: about a second on two cores
_MOST_TOKENS = 1024
# What a model computes differs before and after this many tokens.
_THRESHOLDS = ("original_max_position_embeddings", "sliding_window", "attention_window_size", "attention_chunk_size")
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.004}  # of the greatest logit

_log = logging.getLogger("shoal")


class _Case(NamedTuple):
    """A prompt, and the greedy tokens of ``generate`` with the scores that each was chosen from."""

    ids: list[int]
    tokens: list[int]
    scores: list[torch.Tensor]


def choose_engine(
    component: Component, model: Any, limits: Limits, *, cache_tokens: int, is_static: bool
) -> HfEngine | HfStaticEngine:
    """Return the engine of the first way of batching that computes ``model`` rightly; what was chosen is logged.

    The ways are continuous batches (left out with ``is_static``), static batches, and one request at a time. If the
    model's rope changes at a number of tokens, longer requests are not computed beside others in static batches.

    Raises:
        ArtifactError: the model does not generate at all, or no way gives the tokens of its own ``generate``.
    """
    config = model.config.get_text_config().to_dict()
    thresholds = sorted({size for size in _find(config, *_THRESHOLDS) if isinstance(size, int) and size > 0})
    has_changing_rope = any(kind == "longrope" or "dynamic" in str(kind) for kind in _find(config, "rope_type"))
    changes = [size for size in thresholds if size < limits.context]
    tried = [size for size in changes if size * model.num_parameters() <= _MOST_WORK and size <= _MOST_TOKENS]
    together = min([limits.context, *changes]) if has_changing_rope else limits.context
    ways: dict[str, Callable[[], HfEngine | HfStaticEngine]] = {
        "continuous batches": lambda: HfEngine(model, limits, cache_tokens=cache_tokens),
        "static batches": lambda: HfStaticEngine(model, limits, together=together),
        "one request at a time": lambda: HfStaticEngine(model, limits, together=0),
    }
    faults = {}
    if is_static:
        del ways["continuous batches"]
    elif has_changing_rope and tried != changes:
        faults["continuous batches"] = f"its rope changes after {changes[0]} tokens"
        del ways["continuous batches"]
    kind = type(model).__name__
    cases = _make_cases(model, limits, tried)
    for way, make in ways.items():
        fault, engine = _try(make, component, cases)
        if engine is not None:
            reasons = "".join(f"; {other} are not used: {why}" for other, why in faults.items())
            _log.log(logging.WARNING if faults else logging.INFO, "%s is computed in %s%s", kind, way, reasons)
            return engine
        faults[way] = fault
    raise ArtifactError(
        f"transformers {version} cannot serve {kind}: {'; '.join(f'{way}: {why}' for way, why in faults.items())}.",
        "Use another engine (llm-vllm, or llm-onnx with shoal add-model --decoder), or another model.",
    )


def _find(config: Mapping[str, Any], *names: str) -> Iterator[Any]:
    """Yield the values of these names in a configuration and its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _find(value, *names)
        elif name in names:
            yield value


def _make_cases(model: Any, limits: Limits, thresholds: Sequence[int]) -> list[_Case]:
    """Let ``generate`` continue random prompts: short ones, and for each threshold one before it and one after it.

    The first one is a single token, alone and before all others: some models keep a state from prompt to prompt.
    """
    sizes, new = _SIZES if model.num_parameters() < _LARGE else _LARGE_SIZES
    lengths = [*sizes, *(size for each in thresholds for size in (each - 2, each + 2))]
    random = np.random.default_rng(0)
    cases = []
    for length in lengths:
        room = min(new, limits.context - length)
        if length > 0 and room > 0:
            cases.append(_generate(model, random.integers(0, limits.vocabulary, length).tolist(), room))
    return cases


def _generate(model: Any, ids: list[int], new: int) -> _Case:
    given = torch.tensor([ids])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=new, pad_token_id=0, output_scores=True, return_dict_in_generate=True
    )
    try:
        out = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    except Exception as error:  # of many kinds, by model
        raise ArtifactError(
            f"{type(model).__name__} does not continue a text of {len(ids)} tokens: {error}",
            "Use another engine, or another model.",
        ) from error
    return _Case(ids, out.sequences[0, len(ids) :].tolist(), [scores[0].float() for scores in out.scores])


def _try(
    make: Callable[[], HfEngine | HfStaticEngine], component: Component, cases: Sequence[_Case]
) -> tuple[str, HfEngine | HfStaticEngine | None]:
    """Make an engine, and let it continue the prompts, beside each other and the first one alone.

    Return the engine, or what is wrong with it.
    """
    try:
        engine = make()
    except ShoalError as error:
        return error.what, None
    try:
        held = [case for case in cases if len(case.ids) + len(case.tokens) <= engine.limits.context]
        wrong = 0
        for together in (held, held[:1]):
            streams = [_ask(engine, component, case) for case in together]
            for case, stream in zip(together, streams, strict=True):
                found = [token for answer in stream for token in answer["output_ids"].ravel().tolist()]
                wrong += not _is_right(case, found)
        fault = f"{wrong} of {len(held) + 1} prompts get other tokens than from generate" if wrong else ""
    except ShoalError as error:
        fault = error.what
    if not fault:
        return "", engine
    engine.close()
    return fault, None


def _ask(engine: HfEngine | HfStaticEngine, component: Component, case: _Case) -> QueueStream:
    stream = QueueStream(component, 1)
    engine.admit(TokenRequest(tuple(case.ids), len(case.tokens), sampling=Sampling(top_k=1)), stream)
    return stream


def _is_right(case: _Case, found: Sequence[int]) -> bool:
    """Whether the tokens are those of ``generate``, up to a choice between two tokens with about the same score."""
    for scores, token, right in zip(case.scores, found, case.tokens, strict=True):
        if token != right:
            tolerance = _TOLERANCES[torch.float32] * float(scores.abs().max())
            return float(scores[right] - scores[token]) <= tolerance
    return True
