"""Facts about the models of a repository by which requests to them are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shoal.authoring.repository.call_graph import find_below
from shoal.authoring.repository.config import ModelConfig
from shoal.kit.component.spec import ModelSpec


class Rules(NamedTuple):
    """Facts about a model that decide what a request to it may ask for.

    ``num_priorities`` is the greatest number of priority levels of the model and of the models that it calls.
    ``takes_any``: members of the generate extension's JSON that are no inputs pass as parameters, as in Triton.
    """

    spec: ModelSpec
    num_priorities: int = 0
    takes_any: bool = False


def read_rules(configs: Mapping[str, ModelConfig], *, is_lenient: bool = False) -> dict[str, Rules]:
    """Return the rules for requests to each model of a repository.

    NVIDIA's vLLM backend takes its settings as parameters, so what stands on it takes any; ``is_lenient``: all do.
    """
    below = find_below(configs)
    levels = {name: config.message.dynamic_batching.priority_levels for name, config in configs.items()}
    takers = {name for name, config in configs.items() if is_lenient or config.backend == "vllm"}

    def read(name: str) -> Rules:
        members = (name, *below[name])
        return Rules(configs[name].spec, max(levels.get(each, 0) for each in members), not takers.isdisjoint(members))

    return {name: read(name) for name in configs}
