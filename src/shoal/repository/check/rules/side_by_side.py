"""Steps that an ensemble runs at once: what Triton did not bear for long."""

from __future__ import annotations

from shoal.environment.targets import FIRST_SIDE_BY_SIDE
from shoal.repository.check.findings import Findings, Rule, Severity
from shoal.repository.check.reading.models import Model, Repository
from shoal.repository.messages import first_steps

FIRST = Rule(
    "several-first-steps",
    Severity.WARNING,
    "One step reads the request before others read it side by side",
    "Before 26.02 Triton does not bear that a step fails while another one of the same request runs, and before 26.05"
    " not that both do: it may never answer again over gRPC, or end. Steps that read the request refuse what is wrong"
    " with it, so that any client can bring that about.",
    "core, pull requests 466 and 483; tried on Triton 24.10.",
    'step [ { model_name: "tokens" input_map { key: "TEXT" value: "TEXT" } ... },\n'
    '       { model_name: "words" input_map { key: "TEXT" value: "TEXT" } ... } ]',
    'step [ { model_name: "checked_text" input_map { key: "TEXT" value: "TEXT" } ... },\n'
    '       { model_name: "tokens" input_map { key: "TEXT" value: "checked" } ... },\n'
    '       { model_name: "words" input_map { key: "TEXT" value: "checked" } ... } ]',
)
RULES = (FIRST,)


def find(model: Model, repository: Repository) -> Findings:
    """Several steps that begin at once, where the target is known and too old."""
    if model.message is None or repository.target is None or repository.target.release >= FIRST_SIDE_BY_SIDE:
        return
    steps, first = model.message.ensemble_scheduling.step, first_steps(model.message)
    if len(first) > 1:
        names = ", ".join(steps[index].model_name for index in first)
        yield FIRST.at(
            model.at("ensemble_scheduling", "step", first[1], "model_name"),
            f"The steps {names} read the request side by side; where one refuses it, Triton {repository.target.version}"
            " may stop answering.",
            "Let one step read it first and hand it on, as shoal's checked_text does with a text, or serve with 26.05"
            " or later.",
        )
