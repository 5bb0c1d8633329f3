"""The tensors that a ``model.py`` reads and writes, compared with those that its configuration declares."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.check.python.dataflow import Flow, Use
from shoal.check.python.source import Source, examine

READS = Rule("reads-unknown-input", Severity.WARNING)
WRITES = Rule("writes-unknown-output", Severity.WARNING)
NEVER_WRITTEN = Rule("output-never-written", Severity.WARNING)
CONFIG = Rule("wrong-config-name", Severity.ERROR, is_core=True)
RULES = (READS, WRITES, NEVER_WRITTEN, CONFIG)


def find(model: Model, repository: Repository) -> Findings:
    """Compare what a Python model reads and writes with what it declares."""
    del repository
    if model.message is not None and not model.is_completed:
        yield from examine(model, lambda source: _look(source, model))


def _look(source: Source, model: Model) -> Findings:
    flow = Flow(source)
    states = model.message.sequence_batching
    inputs = [*(t.name for t in model.inputs), *(c.name for c in states.control_input)]
    inputs += [*(s.input_name for s in states.state), *(n for b in model.message.batch_input for n in b.target_name)]
    outputs = [*(t.name for t in model.outputs), *(s.output_name for s in states.state)]
    what = "It reads the input {}, which {} does not declare."
    yield from _check(source, READS, flow.reads, inputs, what, model)
    what = "It writes the output {}, which {} does not declare."
    # A name that one of them has wrong is most likely the one that the other seems not to use.
    unknown = list(_check(source, WRITES, flow.writes, outputs, what, model))
    yield from unknown
    if not unknown and not flow.is_writing_open:
        yield from _check_written(source, flow, model)
    for uses, known in ((flow.input_configs, inputs), (flow.output_configs, outputs)):
        yield from _check(source, CONFIG, uses, known, "It asks for {}, which {} does not declare.", model)


def _check_written(source: Source, flow: Flow, model: Model) -> Findings:
    written = {name for use in flow.writes for name in use.names}
    for index, tensor in enumerate(model.outputs):
        if written and tensor.name not in written:
            yield NEVER_WRITTEN.at(
                model.at("output", index, "name"),
                f"{source.path.relative_to(model.folder)} never writes the output {tensor.name}.",
                "Write it, or leave it out here.",
            )


def _check(source: Source, rule: Rule, uses: Iterable[Use], known: list[str], what: str, model: Model) -> Findings:
    for use in uses:
        for name in sorted(use.names - set(known)) if use.is_certain else ():
            shown = f"Declared: {', '.join(known)}." if known else "Declare it."
            yield rule.at(source.at(use.node), what.format(name, model.path.name), shown)
