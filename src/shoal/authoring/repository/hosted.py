"""Configurations of the models that other models host in their process."""

from __future__ import annotations

from shoal.authoring.repository.config import ModelConfig, as_config
from shoal.authoring.repository.versions import list_made
from shoal.errors import ArtifactError
from shoal.kit.component.spec import HOSTED_CONFIG, TOGETHER
from shoal.system.files import read_text


def find_hosted(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the models that a model hosts, by name, from its first version folder.

    Raises:
        ArtifactError: a configuration cannot be read.
    """
    from google.protobuf import json_format
    from tritonclient.grpc import model_config_pb2

    found = {}
    for name in config.hosts:
        place = list_made(config)[0] / TOGETHER / name
        try:
            message = json_format.Parse(read_text(place / HOSTED_CONFIG), model_config_pb2.ModelConfig())
        except (OSError, ValueError, json_format.ParseError):
            what = f"{config.name} hosts {name}, whose {place / HOSTED_CONFIG} cannot be read."
            raise ArtifactError(what, "Compose it again: shoal compose ... --together") from None
        found[name] = as_config(message, place)
    return found
