"""Rules for what a model serves in OpenAI's API: the parameter ``api``, and the labels of classes."""

from __future__ import annotations

from dataclasses import replace

from shoal.authoring.check.findings import Findings, Rule, Severity
from shoal.authoring.check.models import Model, Repository, is_file
from shoal.authoring.repository.apis import find_served, read_labels
from shoal.errors import ArtifactError

API = Rule("api-misfit", Severity.ERROR)
LABELS = Rule("labels-misfit", Severity.ERROR)


def find(model: Model, repository: Repository) -> Findings:
    """Find a parameter ``api`` that the model's tensors do not fit, and labels that do not fit the classes."""
    if model.config is None:
        return
    is_decoupled = repository.is_decoupled(model.name)
    config = replace(model.config, spec=replace(model.config.spec, is_decoupled=is_decoupled))
    try:
        served = find_served(config)
    except ArtifactError as error:
        yield API.at(model.at_entry("parameters", key="api", within=("value",)), error.what, error.fix)
        return
    index = next((at for at, tensor in enumerate(config.message.output) if tensor.name == served.output), 0)
    if not (served.output and is_file(model.folder / config.message.output[index].label_filename)):
        return  # it has none; or it is missing, for which there is another rule
    try:
        read_labels(config, served)
    except ArtifactError as error:
        yield LABELS.at(model.at("output", index, "label_filename"), error.what, error.fix)
