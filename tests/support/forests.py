"""Declarations of forests."""

from __future__ import annotations

import numpy as np

from shoal.kit.component.spec import ModelSpec

CHANCES = np.array([[0.25], [0.5], [0.625], [1.0]], np.float32)  # of the second of two classes


def declare(width: int, parameters: dict[str, str], num_features: int = 6) -> ModelSpec:
    return ModelSpec.from_config(
        {
            "name": "forest",
            "max_batch_size": 512,
            "input": [{"name": "input__0", "data_type": "TYPE_FP32", "dims": [num_features]}],
            "output": [{"name": "output__0", "data_type": "TYPE_FP32", "dims": [width]}],
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        }
    )
