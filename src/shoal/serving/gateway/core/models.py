"""Facts about a repository's models: which models they call, time-outs, processes, and which ones clients may call."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from shoal.authoring.repository.call_graph import find_below
from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.default_model import find_top
from shoal.authoring.repository.model_folders import read_calls
from shoal.errors import InputError

STREAM_SECONDS = 60.0  # that a model which answers in pieces may wait, without processor time
LOAD_SECONDS = 600.0  # that all models may take to load, if none declares more


def read_hang_seconds(configs: Mapping[str, ModelConfig]) -> dict[str, float]:
    """Return, for some models, how many seconds the model may run a batch without using the processor.

    The parameter ``hang_seconds`` gives the number; without it, a decoupled model has 60 s. Other models are left out.

    Raises:
        ArtifactError: a parameter ``hang_seconds`` is not a number.
    """
    found = {name: STREAM_SECONDS for name, config in configs.items() if config.spec.is_decoupled}
    given = {name: config.hang_seconds for name, config in configs.items()}
    return found | {name: seconds for name, seconds in given.items() if seconds is not None}


def find_load_seconds(configs: Mapping[str, ModelConfig]) -> float:
    """Return the number of seconds that all models may take to load: 600, or the highest parameter ``load_seconds``.

    Raises:
        ArtifactError: a parameter ``load_seconds`` is not a number.
    """
    return max([LOAD_SECONDS, *(config.load_seconds for config in configs.values())])


def find_slots(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Return, by model, how many requests the model computes at once.

    This is the lowest parameter ``slots`` of the model and of the models that it calls. Models without it are left out.

    Raises:
        ArtifactError: a parameter ``slots`` is not a whole number of 1 or more.
    """
    found = {name: number for name, config in configs.items() if (number := config.slots) is not None}
    below = find_below(configs)
    slots = {name: [found[each] for each in (name, *below[name]) if each in found] for name in configs}
    return {name: min(each) for name, each in slots.items() if each}


def find_widths(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Return, by model, how many requests it needs to have at a time so that no instance waits for the next one.

    This is twice what the model and the models that it calls compute at once, and at least 4. With ``slots``, it is a
    quarter more than these: such requests take long, and one that waits in Triton can no longer be overtaken.

    Raises:
        ArtifactError: a parameter ``slots`` is not a whole number of 1 or more.
    """

    def count(config: ModelConfig) -> int:
        if config.is_ensemble:
            return 0
        is_batched = config.message.HasField("dynamic_batching") or config.message.HasField("sequence_batching")
        rows = max(1, config.spec.max_batch_size) if is_batched else 1
        return config.spec.num_instances * rows

    below, slots = find_below(configs), find_slots(configs)
    widths = {
        name: max(4, 2 * sum(count(configs[each]) for each in {name, *below[name]} if each in configs))
        for name in configs
    }
    return widths | {name: number + max(2, number // 4) for name, number in slots.items()}


def count_processes(configs: Mapping[str, ModelConfig]) -> dict[str, int]:
    """Return the least number of processes of each model that runs in Python: one per instance.

    Triton may start more, because an instance group for GPUs that does not list them is counted for one GPU.
    """
    return {
        name: config.spec.num_instances
        for name, config in configs.items()
        if config.backend == "python" or config.message.runtime.endswith(".py")
    }


def find_exposed(configs: Mapping[str, ModelConfig], names: Iterable[str]) -> set[str]:
    """Return the models that clients may call: ensembles, models with the parameter ``public``, and those in ``names``.

    If there are none, return all models.

    Raises:
        ArtifactError: a parameter ``public`` is neither true nor false.
    """
    found = set(names) & configs.keys()
    for name, config in configs.items():
        if config.is_public or config.is_ensemble:
            found.add(name)
    return found or set(configs)


def find_default(configs: Mapping[str, ModelConfig], exposed: Container[str], composed_for: Sequence[str]) -> str:
    """Return the model that clients get if they name no model; empty if several models are possible.

    ``composed_for`` are the models for which the repository was composed.
    """
    try:
        return find_top(read_calls({n: c for n, c in configs.items() if n in exposed}), "The server", composed_for)
    except InputError:
        return ""
