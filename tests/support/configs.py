"""Model configurations of a small repository, without files: an engine, models in Python and an ensemble."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from shoal.authoring.repository.config import ModelConfig, as_config

PYTHON = """
backend: "python" max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
TOKENS = """
output [ { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] } ]
output [ { name: "num_output_tokens" data_type: TYPE_UINT32 dims: [ 1 ] } ]
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
ENGINE = f"""
backend: "python" {DECOUPLED} {TOKENS}
input [ {{ name: "PROMPT" data_type: TYPE_STRING dims: [ -1, 2 ] }} ]
input [ {{ name: "SEED" data_type: TYPE_INT64 dims: [ 1 ] optional: true }} ]
input [ {{ name: "stop" data_type: TYPE_BOOL dims: [ 1 ] optional: true }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 4
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling {
  step [
    { model_name: "FIRST" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "Y" value: "t" } },
    { model_name: "SECOND" model_version: -1 input_map { key: "X" value: "t" } output_map { key: "Y" value: "Y" } }
  ]
}
"""


def chain(first: str, second: str) -> str:
    """Text of an ensemble of two models."""
    return ENSEMBLE.replace("FIRST", first).replace("SECOND", second)


def parameter(name: str, value: str) -> str:
    """Text of a parameter."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def make_configs(folder: Path = Path(), **texts: str) -> dict[str, ModelConfig]:
    """Parse configurations, by model."""
    return {
        name: as_config(text_format.Parse(text, model_config_pb2.ModelConfig(name=name)), folder / name)
        for name, text in texts.items()
    }
