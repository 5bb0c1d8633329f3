"""Misspelt tensor names in a ``model.py``, compared with the names that its configuration declares.

A ``model.py`` may serve several configurations, so a name that is not declared may be right. Reported are only string
literals with the letters of a declared name, in another order or case.
"""

from __future__ import annotations

import ast

from shoal.check.findings import Findings, Rule, Severity
from shoal.check.models import Model, Repository
from shoal.check.python.source import PB, Source, argument, examine

READS = Rule("reads-unknown-input", Severity.WARNING)
CONFIG = Rule("wrong-config-name", Severity.ERROR, is_core=True)


def find(model: Model, repository: Repository) -> Findings:
    """Find misspelt names of tensors in a Python model."""
    del repository
    if model.message is not None and not model.is_completed:
        yield from examine(model, lambda source: _look(source, model))


def _look(source: Source, model: Model) -> Findings:
    states = model.message.sequence_batching
    inputs = [*(t.name for t in model.inputs), *(c.name for c in states.control_input)]
    inputs += [*(s.input_name for s in states.state), *(n for b in model.message.batch_input for n in b.target_name)]
    outputs = [*(t.name for t in model.outputs), *(s.output_name for s in states.state)]
    functions = {
        "get_input_tensor_by_name": (READS, "reads the input", inputs),
        "get_input_config_by_name": (CONFIG, "asks for", inputs),
        "get_output_config_by_name": (CONFIG, "asks for", outputs),
    }
    for call in source.calls:
        function = source.name(call.func).removeprefix(f"{PB}.")
        if function not in functions:
            continue
        rule, what, declared = functions[function]
        match argument(call, 1, "name"):
            case ast.Constant(value=str(name)) if name not in declared and _is_misspelt(name, declared):
                yield rule.at(
                    source.at(call),
                    f"It {what} {name}, which {model.path.name} does not declare.",
                    f"Declared: {', '.join(declared)}.",
                )


def _is_misspelt(name: str, declared: list[str]) -> bool:
    """Whether a declared name has the same letters, in another order or case."""
    return sorted(name.lower()) in [sorted(other.lower()) for other in declared]
