"""Record of a run: JSON with the figures of every repeat, the machine and the versions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import shoal
from shoal.bench.advice.evidence import Evidence
from shoal.bench.advice.rules import advise
from shoal.bench.compare import compare
from shoal.bench.figures import Measured, rounded
from shoal.bench.inputs import Inputs
from shoal.bench.measure import Settings
from shoal.bench.target import Target
from shoal.machine import describe_machine, library_versions
from shoal.repository.manifest import launch_flags

LIBRARIES = ("numpy", "torch", "tokenizers", "treelite", "tritonclient", "nvidia-pytriton")
NEIGHBOURS = 0.1  # of all cores' time: other programs that use more make the figures unreliable


def make_record(
    targets: Sequence[Target],
    inputs: Inputs,
    settings: Settings,
    measured: Sequence[Measured],
) -> dict[str, Any]:
    """Build the record: figures, machine, versions, settings and advice, as JSON values."""
    machine = describe_machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "versions": {"shoal": shoal.__version__, **library_versions(*LIBRARIES)},
        "settings": asdict(settings),
        "inputs": {
            "source": inputs.source,
            "num_rows": inputs.num_rows,
            "mean_bytes_a_row": rounded(inputs.text_bytes),
        },
        "repositories": [{**t.describe(), "launch_flags": launch_flags(t.repository)} for t in targets],
        "loads": [entry.as_dict() for entry in measured],
        "comparison": compare(measured),
        "notes": list(_notes(measured)),
        "advice": {t.label: [asdict(a) for a in advise(make_case(t, measured, machine))] for t in targets},
    }


def make_case(target: Target, measured: Sequence[Measured], machine: Mapping[str, Any]) -> Evidence:
    """Collect the evidence for advice on one repository."""
    cells = {entry.cell: entry.median for entry in measured if entry.label == target.label}
    graph = target.graph
    levels = dict(zip((step.model for step in graph.steps), graph.levels(), strict=True))
    if len(levels) < len(graph.steps) or any(graph.members[name].is_ensemble for name in levels):
        levels = {}  # models and steps do not correspond one to one
    return Evidence(cells, target.steps(), machine["cores"], levels, machine["flags"])


def _notes(measured: Iterable[Measured]) -> Iterable[str]:
    """Yield warnings about disturbed measurements."""
    disturbed = [(entry, entry.median.other_cpu) for entry in measured if entry.median.other_cpu > NEIGHBOURS]
    if disturbed:
        most = max(share for _, share in disturbed)
        yield (
            f"Other programs took up to {most:.0%} of the cores' time, in {len(disturbed)} of the loads more than"
            f" {NEIGHBOURS:.0%}: figures are lower than on a quiet machine."
        )
