"""Advice from a measurement: what would make a pipeline faster and what would not, each with the measured figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from shoal.authoring.repository.config import ModelConfig
from shoal.lab.bench.record import Cell, Figures
from shoal.lab.bench.steps import StepFigures

IDLE = 0.5  # of the time: an instance that runs less is not a bottleneck
BUSY = 0.85  # of the time: an instance that runs this much is a bottleneck
SATURATED = 0.9  # of all cores' time
GAIN = 1.2  # smallest ratio of rates that is worth a change
FULL = 0.95  # of the best rate: rates above it count as equal
ALONE = 1.2  # requests per execution: up to this, requests are run one by one
CLIENT_FULL = 0.8  # cores: one Python process cannot take many more than one
LARGE_SHARE = 0.3  # of a request's time
THREADS_FULL = 0.8  # of its threads: an instance that uses more is limited by their number
# Parameters with the number of an instance's threads: a component's, and those of Triton's backends.
THREADS = ("threads", "intra_op_thread_count", "INTRA_OP_THREAD_COUNT", "INFERENCE_NUM_THREADS")
COMPUTING = 0.2  # share of a run on a core: a step below it waits for something other than the CPU


@dataclass(frozen=True)
class Advice:
    """One proposal: ``what`` to do, ``why``, and ``lines``, the changed settings for the model's config.pbtxt.

    If ``helps`` is False, ``what`` names a change that is not worth trying. ``kind`` is a fixed name for programs.
    """

    kind: str
    model: str
    what: str
    why: str
    lines: str = ""
    helps: bool = True


@dataclass(frozen=True)
class Evidence:
    """Input of `advise`: the median figures of each load, the models' configurations, and the number of cores."""

    cells: Mapping[Cell, Figures]
    configs: Mapping[str, ModelConfig]
    cores: int


def advise(evidence: Evidence) -> list[Advice]:
    """Return the proposals, those that help first. One of them names the bottleneck.

    Most rules look at two loads: the smallest requests from the most callers, which Triton can batch, and the load with
    the most rows per second. The rule on queue delays looks at one caller with one row, the rule on request sizes at
    all sizes.
    """
    found: list[Advice] = []
    for cell, figures in _crowded(evidence):
        found += _bottleneck(cell, figures, evidence.cores)
        found += _waiting(evidence, cell, figures)
        found += _processor(evidence, cell, figures)
    found += _idle(evidence, {a.model for a in found if a.helps and a.kind in ("batching", "instances")})
    found += _request_size(evidence)
    found += _alone(evidence)
    chosen: dict[tuple[str, str], Advice] = {}
    for advice in sorted(found, key=lambda advice: not advice.helps):  # helpful under one load is enough
        chosen.setdefault((advice.kind, advice.model), advice)
    batched = {model for kind, model in chosen if kind == "batching" and chosen[kind, model].helps}
    # Batching first: it changes how busy the instances are, so measure again before adding instances.
    return [a for a in chosen.values() if not (a.kind == "instances" and a.model in batched)]


def _crowded(evidence: Evidence) -> list[tuple[Cell, Figures]]:
    """Return the load with the most callers and the smallest requests, and the load with the most rows per second."""
    several = _several(evidence)
    best = max(several, key=lambda cell: several[cell].rows_per_s)
    crowd = max(several, key=lambda cell: (cell.batch == min(c.batch for c in several), cell.callers))
    return [(cell, several[cell]) for cell in dict.fromkeys((crowd, best)) if several[cell].steps]


def _several(evidence: Evidence) -> dict[Cell, Figures]:
    """Return the loads with more than one caller, or all loads if every load has one caller."""
    return {cell: figures for cell, figures in evidence.cells.items() if cell.callers > 1} or dict(evidence.cells)


def _is_full(figures: Figures) -> bool:
    """Whether the cores are known to be saturated."""
    return figures.cpu is not None and figures.cpu >= SATURATED


def _tell_cores(figures: Figures, words: str) -> str:
    """Return how busy the cores are, after ``words``; empty if it is not known."""
    return "" if figures.cpu is None else f"{words} the cores are busy {figures.cpu:.0%}"


def _bottleneck(cell: Cell, figures: Figures, cores: int) -> Iterator[Advice]:
    name, step = max(figures.steps.items(), key=lambda item: item[1].busy)
    if step.busy < IDLE:
        why, own = f"With {cell} the busiest, {name}, runs {step.busy:.0%} of the time", figures.client_cpu * cores
        if _is_full(figures):
            why += f", and the cores are busy {figures.cpu:.0%}, {figures.client_cpu:.0%} of it with this client"
        elif own >= CLIENT_FULL:
            why += f", and the client takes {own:.1f} cores: it is the limit"
        elif figures.server_ms and figures.server_ms < IDLE * figures.p50_ms:
            why += (
                f", and of a request's {figures.p50_ms:.1f} ms only {figures.server_ms:.1f} are in Triton: the rest is"
            )
            why += " on the way, in the network or a proxy"
        yield Advice("bottleneck", "", "No step is the bottleneck.", f"{why}.")
        return
    others = [other.busy for other_name, other in figures.steps.items() if other_name != name]
    rest = f", the other steps' at most {max(others):.0%}" if others else ""
    cpu = f", and a row takes {step.cpu_ms:.2f} ms of CPU there" if step.cpu_ms is not None else ""
    yield Advice(
        "bottleneck",
        "",
        f"The step to look at is {name}.",
        f"With {cell} its instances run {step.busy:.0%} of the time{rest}{cpu}.",
    )


def _waiting(evidence: Evidence, cell: Cell, figures: Figures) -> Iterator[Advice]:
    """Advise to batch the requests to a busy step, or to give the step more instances."""
    for name, step in figures.steps.items():
        config = evidence.configs[name]
        is_one_by_one = cell.callers > 1 and step.requests_per_execution <= ALONE
        has_room = _can_batch(config) and 2 * cell.batch <= config.spec.max_batch_size
        if is_one_by_one and has_room and step.busy >= IDLE and _is_worth_batching(evidence, figures):
            yield Advice(
                "batching",
                name,
                f"Let Triton join the requests that wait for {name}.",
                f"With {cell} each execution has {step.requests_per_execution:.1f} requests of the"
                f" {config.spec.max_batch_size} rows that it may have, its instances run {step.busy:.0%} of the time,"
                f" and a request waits {step.queue_ms:.1f} of {step.total_ms:.1f} ms.",
                "dynamic_batching { }",
            )
        elif step.busy >= BUSY:
            yield from _instances(evidence, cell, figures, name, step)


def _can_batch(config: ModelConfig) -> bool:
    return config.spec.max_batch_size > 1 and config.message.WhichOneof("scheduling_choice") is None


def _is_worth_batching(evidence: Evidence, figures: Figures) -> bool:
    """Whether batching can help. On saturated cores it can only if a row costs less in a larger request than alone.

    The measured rates of the request sizes show this; if they are missing, the answer is True.
    """
    if figures.cpu is not None and figures.cpu < SATURATED:
        return True
    rates = _rates(evidence)
    larger = [rate for batch, rate in rates.items() if batch > 1]
    return not larger or 1 not in rates or max(larger) >= GAIN * rates[1]


def _instances(evidence: Evidence, cell: Cell, figures: Figures, name: str, step: StepFigures) -> Iterator[Advice]:
    if step.cpu_ms is None and _is_full(figures):
        return  # this step may be what saturates the cores
    number = evidence.configs[name].spec.num_instances
    taken = _cores_of(step, number) / number
    free = evidence.cores * (1 - (figures.cpu or 0))
    yield from _threads(evidence.configs[name], taken, 0.0 if figures.cpu is None else free / number)
    if cell.callers == 1:
        return  # one request at a time: another instance would be idle
    more = min(number, int(free / taken)) if _computes(step) else number
    busy = f"With {cell} its {number} instance{' runs' if number == 1 else 's run'} {step.busy:.0%} of the time"
    if more < 1:
        yield Advice(
            "instances",
            name,
            f"Another instance of {name} would not help.",
            f"{busy}, taking {taken:.1f} cores each, and only {free:.1f} of {evidence.cores} are free.",
            helps=False,
        )
        return
    words, lines = _add_instances(evidence.configs[name], more)
    each = "" if step.cpu_ms is None else f"; an instance takes {taken:.1f} of {evidence.cores} cores"
    gpu = " This does not help on a saturated GPU: check its utilisation." if _is_on_gpu(evidence, name) else ""
    yield Advice(
        "instances",
        name,
        f"Give {name} {words}.",
        f"{busy} with {step.requests_per_execution:.1f} requests per execution"
        f"{_tell_cores(figures, ', while') or '; whether cores are free cannot be seen here: look first'}{each}.{gpu}",
        lines,
    )


def _threads(config: ModelConfig, taken: float, free: float) -> Iterator[Advice]:
    """Advise to raise the configured number of threads, if each instance uses them all and has ``free`` cores more."""
    given = {key: value for key, value in config.spec.parameters.items() if key in THREADS and value.isdecimal()}
    for key, value in given.items():
        if 0 < int(value) * THREADS_FULL <= taken and free >= THREADS_FULL:
            more = int(value) + max(1, int(free))
            yield Advice(
                "threads",
                config.name,
                f"Give {config.name} more threads: {key} {more}.",
                f"Its instances run all the time, each takes {taken:.1f} cores with {key} {value}, and"
                f" {free:.1f} cores are free for each. This helps a model whose library divides its work.",
                f'parameters {{ key: "{key}" value {{ string_value: "{more}" }} }}',
            )


def _cores_of(step: StepFigures, instances: int) -> float:
    """Estimate how many cores all instances of a step use together; 0 for a model without Python stub processes.

    The estimate uses the step's own number of rows, since a step can get more or fewer rows than the pipeline.
    """
    of_a_run = (step.cpu_ms or 0) * step.rows_per_execution / step.execution_ms if step.execution_ms else 0.0
    return step.busy * instances * of_a_run


def _computes(step: StepFigures) -> bool:
    """Whether the instances of a step use the host CPU for at least a fifth of their run time."""
    return (step.cpu_ms or 0) * step.rows_per_execution >= COMPUTING * step.execution_ms


def _is_on_gpu(evidence: Evidence, name: str) -> bool:
    return any(group.kind == group.KIND_GPU for group in evidence.configs[name].message.instance_group)


def _processor(evidence: Evidence, cell: Cell, figures: Figures) -> Iterator[Advice]:
    """If the cores are saturated, advise against more instances, and for a cheaper model in the most expensive step."""
    if figures.cpu is None or figures.server_cpu is None or figures.other_cpu is None or not _is_full(figures):
        return
    computing = [name for name, step in figures.steps.items() if _computes(step)]
    yield Advice(
        "cpu",
        "",
        f"More instances of CPU-bound steps would not help: {', '.join(computing) or 'no step'}.",
        f"With {cell} the {evidence.cores} cores are busy {figures.cpu:.0%} of the time: the server takes"
        f" {figures.server_cpu:.0%}, the client {figures.client_cpu:.0%}, other programs {figures.other_cpu:.0%}."
        + (" Measure again without those." if figures.cpu - figures.other_cpu < SATURATED else ""),
        helps=False,
    )
    known = {name: step.cpu_ms for name, step in figures.steps.items() if step.cpu_ms is not None}
    if not known or not sum(known.values()):
        return
    name = max(known, key=known.__getitem__)
    if _cores_of(figures.steps[name], evidence.configs[name].spec.num_instances) < LARGE_SHARE * evidence.cores:
        return  # other steps or programs use the cores
    yield Advice(
        "cost",
        name,
        f"A cheaper {name} would help, such as a smaller model in its place. This would change the answers.",
        f"A row takes {known[name]:.2f} ms of CPU there, {known[name] / sum(known.values()):.0%} of all steps'.",
    )


def _idle(evidence: Evidence, improved: Set[str]) -> Iterator[Advice]:
    """Name the steps that are not bottlenecks, except steps that other advice says to improve (``improved``).

    Also report when the load was too low to tell.
    """
    (cell, figures) = _crowded(evidence)[-1] if _crowded(evidence) else (None, None)
    if cell is None or figures is None:
        return
    busiest = max(step.busy for step in figures.steps.values())
    if busiest < BUSY and not _is_full(figures):
        own = figures.client_cpu * evidence.cores
        has_larger = any(other.batch > cell.batch for other in evidence.cells)  # measured, and not better
        is_client = own >= CLIENT_FULL
        yield Advice(
            "callers",
            "",
            "Increase the load: use more callers."
            if has_larger
            else "Increase the load: use more callers, or more rows per request.",
            f"With {cell} no step runs more than {busiest:.0%} of the time{_tell_cores(figures, ', and')}."
            + (f" The client itself takes {own:.1f} cores: use several processes." if is_client else ""),
        )
    idle = {name: step.busy for name, step in figures.steps.items() if step.busy < IDLE and name not in improved}
    if idle:
        listing = ", ".join(f"{name} {busy:.0%}" for name, busy in idle.items())
        yield Advice(
            "idle",
            "",
            f"More instances of {', '.join(idle)} would not help.",
            f"With {cell} they run {listing} of the time.",
            helps=False,
        )


def _rates(evidence: Evidence) -> dict[int, float]:
    """Return the highest rows/s by rows per request, over the loads with more than one caller if there are any."""
    rates: dict[int, float] = {}
    for cell, figures in sorted(_several(evidence).items()):
        rates[cell.batch] = max(rates.get(cell.batch, 0.0), figures.rows_per_s)
    return rates


def _request_size(evidence: Evidence) -> Iterator[Advice]:
    rates = _rates(evidence)
    best = max(rates.values())
    enough = next(batch for batch in rates if rates[batch] >= FULL * best)
    if enough > 1 and 1 in rates and rates[enough] >= GAIN * rates[1]:
        yield Advice(
            "rows",
            "",
            f"Send {enough} rows per request where possible.",
            f"That gives {rates[enough]:.1f} rows/s; single rows give {rates[1]:.1f}.",
        )
    larger = [batch for batch in rates if batch > enough]
    if larger:
        yield Advice(
            "more rows",
            "",
            f"Requests of more than {enough} row{'' if enough == 1 else 's'} would not help the rate.",
            f"{enough} give {rates[enough]:.1f} rows/s, {larger[-1]} give {rates[larger[-1]]:.1f}.",
            helps=False,
        )


def _alone(evidence: Evidence) -> Iterator[Advice]:
    """Advise to remove a queue delay in which a single caller's request waits, although no other request arrives."""
    alone = evidence.cells.get(Cell(1, 1))
    if alone is None:
        return
    for name, step in alone.steps.items():
        delay = evidence.configs[name].message.dynamic_batching.max_queue_delay_microseconds / 1000
        if delay and step.requests_per_execution <= ALONE and step.queue_ms >= IDLE * delay:
            yield Advice(
                "delay",
                name,
                f"Remove the queue delay of {name}.",
                f"One caller's request waits there {step.queue_ms:.1f} of {alone.p50_ms:.1f} ms for others that do not"
                f" arrive: max_queue_delay is {delay:g} ms. Under load, requests are batched without it.",
                _drop_delay(evidence.configs[name]),
            )


# Lines of a config.pbtxt


def _add_instances(config: ModelConfig, more: int) -> tuple[str, str]:
    """Add at least ``more`` instances to the first group; return the new number in words, and the config.pbtxt lines.

    The ``count`` of an instance group is per GPU in its ``gpus``, or per GPU of the machine if ``gpus`` is empty.
    """
    message = type(config.message)(instance_group=config.message.instance_group)
    group = message.instance_group[0] if message.instance_group else message.instance_group.add()
    group.count = max(1, group.count) + -(-more // max(1, len(group.gpus)))
    if group.kind == group.KIND_GPU and not group.gpus:
        return f"{group.count} instances on each GPU", _text(message)
    total = sum(max(1, each.count) * max(1, len(each.gpus)) for each in message.instance_group)
    each_gpu = f", {group.count} on each of its GPUs" if len(group.gpus) > 1 else ""
    return f"{total} instances{each_gpu}", _text(message)


def _drop_delay(config: ModelConfig) -> str:
    """Return the model's dynamic batching settings without the queue delay, as config.pbtxt lines."""
    message = type(config.message)(dynamic_batching=config.message.dynamic_batching)
    message.dynamic_batching.ClearField("max_queue_delay_microseconds")
    return _text(message)


def _text(message: Any) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(message, as_utf8=True)).rstrip()
