"""Call graph of a repository's models: ensembles call models by their steps, code by the parameter ``calls``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from graphlib import CycleError, TopologicalSorter

from shoal.authoring.repository.config import ModelConfig
from shoal.authoring.repository.hosted import find_hosted
from shoal.errors import ArtifactError, suggest

MAX_NESTED = 100  # models that call one another in a chain


def find_steps(config: ModelConfig) -> list[str]:
    """Return the models of an ensemble's steps, each once, in order."""
    return list(dict.fromkeys(step.model for step in config.steps))


def find_callees(config: ModelConfig) -> list[str]:
    """Return the models that a model calls directly, each once: those of its steps, then those that its code calls."""
    return list(dict.fromkeys([*find_steps(config), *config.calls]))


def reach(names: Iterable[str], follow: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Yield ``names`` and all that ``follow`` reaches from them, each once and the nearest first."""
    found = dict.fromkeys(names)
    waiting = list(found)
    for name in waiting:  # the list grows in the loop
        yield name
        new = [called for called in follow(name) if called not in found]
        found.update(dict.fromkeys(new))
        waiting += dict.fromkeys(new)


def find_below(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each model to the models that it calls, directly or through another model."""
    direct = {name: find_callees(config) for name, config in configs.items()}
    return {name: {*reach(called, lambda each: direct.get(each, ()))} for name, called in direct.items()}


def find_users(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each model to the ensembles and models that call it, directly or through another model."""
    below = find_below(configs)
    return {name: {user for user in configs if name in below[user]} for name in configs}


def find_leaves(configs: Mapping[str, ModelConfig]) -> dict[str, set[str]]:
    """Map each ensemble to the models, but not ensembles, that it calls directly or through another model."""
    models = {name for name, config in configs.items() if not config.is_ensemble}
    return {name: called & models for name, called in find_below(configs).items() if name not in models}


def find_members(config: ModelConfig, find: Callable[[str], ModelConfig | None]) -> dict[str, ModelConfig]:
    """Find the models of an ensemble's steps and the models that code calls, but not the steps of nested ensembles.

    ``find`` returns the model of a name, or None; models that another one hosts are found with that. A nested ensemble
    is marked as decoupled if one of its models is decoupled, because the ensemble's own configuration does not say so.
    """
    found: dict[str, ModelConfig] = {}
    hosted = find_hosted(config)

    def follow(name: str) -> tuple[str, ...]:
        member = hosted.get(name) or (find(name) if name != config.name else None)
        if member is None:
            return ()
        found[name] = member
        hosted.update(find_hosted(member))
        return member.calls

    deque(reach([*sorted(find_steps(config)), *config.calls], follow), maxlen=0)  # to its end
    return mark_decoupled(found, find)


def mark_decoupled(
    members: Mapping[str, ModelConfig], find: Callable[[str], ModelConfig | None]
) -> dict[str, ModelConfig]:
    """Return the models; those of which ``is_decoupled`` is true are marked in their declaration."""
    return {
        name: replace(member, spec=replace(member.spec, is_decoupled=True)) if is_decoupled(member, find) else member
        for name, member in members.items()
    }


def is_decoupled(config: ModelConfig, find: Callable[[str], ModelConfig | None]) -> bool:
    """Whether a model is decoupled or, for an ensemble, a model in it is; models that are missing do not count.

    Triton replaces what an ensemble's own configuration says (core, ensemble_utils.cc).
    """

    @cache
    def look(name: str) -> ModelConfig | None:  # by folder: two configurations may have the same name
        with suppress(ArtifactError):
            return find(name)
        return None

    def follow(name: str) -> list[str]:
        member = look(name)
        return find_steps(member) if member is not None else []

    inner = [config, *map(look, reach(find_steps(config), follow))]
    return any(each.spec.is_decoupled and not each.is_ensemble for each in inner if each is not None)


def sort_decoupled(configs: Mapping[str, ModelConfig]) -> dict[str, bool]:
    """Map each model, after those of its steps, to what ``is_decoupled`` returns for it.

    Ensembles in a circle, and those that call one, are left out.
    """
    steps = {name: find_steps(config) for name, config in configs.items()}
    found: dict[str, bool] = {}
    sorter = TopologicalSorter(steps)
    with suppress(CycleError):  # what does not depend on the circle is still sorted
        sorter.prepare()
    while ready := sorter.get_ready():
        for name in ready:
            is_own = name in configs and configs[name].spec.is_decoupled and not configs[name].is_ensemble
            found[name] = is_own or any(found[called] for called in steps.get(name, ()))
        sorter.done(*ready)
    return found


def find_circle(name: str, configs: Mapping[str, ModelConfig]) -> list[str]:
    """Find a chain of steps from an ensemble back to itself; return the chain's model names, or an empty list."""
    callers: dict[str, str] = {}

    def follow(caller: str) -> list[str]:
        called = find_steps(configs[caller]) if caller in configs else []
        callers.update((each, caller) for each in called if each not in callers)
        return called

    deque(reach([name], follow), maxlen=0)
    if name not in callers:
        return []
    way = [name, callers[name]]
    while way[-1] != name:
        way.append(callers[way[-1]])
    return way[::-1]


def collect(name: str, available: Mapping[str, ModelConfig]) -> list[ModelConfig]:
    """Return the model called ``name`` and all models that its steps and its code call, each before its callers.

    Raises:
        ArtifactError: there is no such model, a model calls itself, directly or through other models, or models call
            one another too deep.
    """
    found: dict[str, ModelConfig] = {}

    def visit(wanted: str, *callers: str) -> None:
        if wanted in found:
            return
        if wanted in callers:
            raise _circle([*callers[callers.index(wanted) :], wanted], available)
        if wanted not in available:
            caller = f", which {callers[-1]} calls" if callers else ""
            fix = f"{suggest(wanted, sorted(available))} Name the folder with models of your own: --project FOLDER"
            raise ArtifactError(f"There is no model {wanted}{caller}.", fix)
        if len(callers) >= MAX_NESTED:
            raise ArtifactError(
                f"The models below {name} call one another more than {MAX_NESTED} deep, up to {wanted}.",
                "Let one ensemble have the steps of several.",
            )
        for called in find_callees(available[wanted]):
            visit(called, *callers, wanted)
        found[wanted] = available[wanted]

    visit(name)
    return list(found.values())


def _circle(circle: list[str], available: Mapping[str, ModelConfig]) -> ArtifactError:
    shown = " -> ".join(circle)
    if all(available[caller].is_ensemble for caller in circle):  # the rule and the error text of Triton's core
        return ArtifactError(f"circular dependency between ensembles: {shown}.", "Take one step out.")
    return ArtifactError(
        f"Models call one another in a circle: {shown}. With every instance busy, none would answer.",
        "Take one of them out of the parameter `calls`, or out of the steps.",
    )
