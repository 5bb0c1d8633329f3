"""Choice of the way of batching for a transformers model: the first way whose tokens are those of ``generate``.

transformers computes some families of models wrongly, without an error, in continuous batches or beside rows with
padding. So each way answers a few prompts before a client does, and the next way is taken if the logits are wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers import __version__ as version

from shoal.errors import ArtifactError, ShoalError
from shoal.kit.component.base import Component
from shoal.kit.generation.contract import Limits, TokenRequest
from shoal.kit.generation.engines.base import AUTO, WAYS
from shoal.kit.generation.engines.hf import HfEngine
from shoal.kit.generation.engines.hf_static import HfStaticEngine
from shoal.kit.generation.row_batches import TrialStream
from shoal.kit.generation.sampler import Sampler

_SIZES = ((1, 3, 9, 24), 4)  # tokens per prompt, and new tokens
_LARGE_SIZES = ((1, 3, 9), 3)  # of a model that needs a second for a token
_LARGE = 1_000_000_000  # weights
_MOST_WORK = 100_000_000_000  # weights times tokens of a prompt: about a second on two cores
_MOST_TOKENS = 1024
# What a model computes differs before and after this many tokens.
THRESHOLDS = ("original_max_position_embeddings", "sliding_window", "attention_window_size", "attention_chunk_size")
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of the greatest logit

_log = logging.getLogger("shoal")


class _Case(NamedTuple):
    """A request, and the greedy tokens of ``generate`` with the logits that each was chosen from."""

    request: TokenRequest
    tokens: list[int]
    logits: list[NDArray[Any]]


def choose_engine(
    component: Component, model: Any, limits: Limits, *, cache_tokens: int, way: str
) -> HfEngine | HfStaticEngine:
    """Return the engine of the first way of batching that computes ``model`` rightly; what was chosen is logged.

    The ways are continuous batches, static batches, and one request at a time. A ``way`` that is named is taken without
    a comparison; ``auto`` compares. If the model's rope changes at a number of tokens, longer requests are not computed
    beside others in static batches.

    Raises:
        ArtifactError: the model does not generate at all, or no way gives the tokens of its own ``generate``.
    """
    config = model.config.get_text_config().to_dict()
    changes = find_sizes(config, limits.context, *THRESHOLDS)
    tried = [size for size in changes if size * model.num_parameters() <= _MOST_WORK and size <= _MOST_TOKENS]
    turns = find_turns(config, limits.context)
    ways: dict[str, Callable[[], HfEngine | HfStaticEngine]] = {
        "continuous": lambda: HfEngine(model, limits, cache_tokens=cache_tokens),
        "static": lambda: HfStaticEngine(model, limits, together=min([limits.context, *turns])),
        "single": lambda: HfStaticEngine(model, limits, together=0),
    }
    faults = {}
    kind = type(model).__name__
    if way != AUTO:
        _log.info("%s is computed in %s, as the parameter batching says, without a comparison", kind, WAYS[way])
        component.context.device.ledger.tell(batching=way)
        return ways[way]()
    if not {*turns} <= {*tried}:
        faults[WAYS["continuous"]] = f"its rope changes after {turns[0]} tokens"
        del ways["continuous"]
    cases = _make_cases(model, limits, tried)
    undo = _keep_configurations(model)
    for name, make in ways.items():
        undo()  # what the way before has changed, such as the attention
        try:
            engine = make()
        except ShoalError as error:
            faults[WAYS[name]] = error.what
            continue
        fault = _find_fault(engine, component, cases, _TOLERANCES.get(model.dtype, _TOLERANCES[torch.float32]))
        if not fault:
            reasons = "".join(f"; not in {other}: {why}" for other, why in faults.items())
            _log.log(logging.WARNING if faults else logging.INFO, "%s is computed in %s%s", kind, WAYS[name], reasons)
            component.context.device.ledger.tell(batching=name)
            return engine
        engine.close()
        faults[WAYS[name]] = fault
    raise ArtifactError(
        f"transformers {version} cannot serve {kind}: {'; '.join(f'{other}: {why}' for other, why in faults.items())}.",
        "Use another engine (llm-vllm, or llm-onnx with shoal add-model --task generate), or another model.",
    )


def _keep_configurations(model: Any) -> Callable[[], None]:
    """Return a function that gives the configurations of a model and its parts their present values again."""
    found = (module.config for module in model.modules() if hasattr(module, "config"))
    kept = [(config, {**vars(config)}) for config in {id(each): each for each in found}.values()]

    def undo() -> None:
        for config, values in kept:
            vars(config).clear()
            vars(config).update(values)

    return undo


def _find(config: Mapping[str, Any], *names: str) -> Iterator[Any]:
    """Yield the values of these names in a configuration and its parts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _find(value, *names)
        elif name in names:
            yield value


def find_turns(config: Mapping[str, Any], context: int) -> list[int]:
    """Return the numbers of tokens, below ``context``, at which the rope of all tokens changes."""
    kinds = {str(kind) for kind in _find(config, "rope_type")}
    is_changing = "longrope" in kinds or any("dynamic" in kind for kind in kinds)
    return find_sizes(config, context, THRESHOLDS[0]) if is_changing else []


def find_sizes(config: Mapping[str, Any], context: int, *names: str) -> list[int]:
    """Return the sizes, below ``context``, that a configuration has under these names."""
    return sorted({size for size in _find(config, *names) if isinstance(size, int) and 0 < size < context})


def _make_cases(model: Any, limits: Limits, thresholds: Sequence[int]) -> list[_Case]:
    """Let ``generate`` continue random prompts: short ones, and for each threshold one before it and one after it.

    The first one is a single token, alone and before all others: some models keep a state from prompt to prompt.
    """
    sizes, new = _SIZES if model.num_parameters() < _LARGE else _LARGE_SIZES
    random = np.random.default_rng(0)
    cases = []
    for size in [*sizes, *(size for each in thresholds for size in (each - 2, each + 2))]:
        if 0 < size < limits.context:
            ids = random.integers(0, limits.vocabulary, size).tolist()
            cases.append(_generate(model, ids, min(new, limits.context - size)))
    return cases


def _generate(model: Any, ids: list[int], new: int) -> _Case:
    given = torch.tensor([ids], device=model.device)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=new, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    try:
        out = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    except Exception as error:  # of many kinds, by model
        raise ArtifactError(
            f"{type(model).__name__} does not continue a prompt of {len(ids)} tokens: {error}",
            "Use another engine, or another model.",
        ) from error
    logits = [rows[0].float().cpu().numpy() for rows in out.logits]
    return _Case(TokenRequest(tuple(ids), new), out.sequences[0, len(ids) :].tolist(), logits)


class _Follower(Sampler):
    """Chooses the tokens of ``generate``, and keeps how much the logits differ, relative to the greatest one."""

    def __init__(self, case: _Case) -> None:
        super().__init__(case.request)
        self._case = case
        self.difference = 0.0

    def follow(self, logits: NDArray[np.float32], ids: list[int]) -> int:
        right = self._case.logits[len(ids)]
        difference = float(np.abs(logits - right).max() / max(1.0, np.abs(right).max()))
        self.difference = max(self.difference, math.inf if math.isnan(difference) else difference)
        return self._case.tokens[len(ids)]


def _find_fault(engine: HfEngine | HfStaticEngine, component: Component, cases: Sequence[_Case], most: float) -> str:
    """Let an engine continue the prompts beside each other, then two of them alone, and return what is wrong."""
    held = [case for case in cases if len(case.request.ids) + case.request.max_tokens <= engine.limits.context]
    for together in (held, held[1:2], held[:1]):
        asked = [(case, TrialStream(component, 1), _Follower(case)) for case in together]
        for case, stream, follower in asked:
            engine.admit(case.request, stream, follower)
        for case, stream, follower in asked:
            try:
                list(stream)
            except ShoalError as error:
                return error.what
            if follower.difference > most:
                return (
                    f"after a prompt of {len(case.request.ids)} token(s), the logits differ from those of generate by"
                    f" {follower.difference:.2g} of the greatest"
                )
    return ""
