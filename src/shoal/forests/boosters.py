"""Header readers for XGBoost and LightGBM model files, without either library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.forests.ubjson import read_ubjson


class Head(NamedTuple):
    """Header of a model; ``objective`` is the library's own name, ``num_classes`` is 1 if a row gets one score."""

    objective: str
    num_features: int
    num_classes: int = 1
    num_targets: int = 1


def is_json(content: bytes) -> bool:
    """Whether an XGBoost model is in JSON; UBJSON begins with the same brace."""
    return re.match(rb'\s*\{\s*"', content) is not None


def parse_xgboost(content: bytes) -> Any:
    """Parse a model in JSON or UBJSON.

    Raises:
        ValueError, RecursionError: it is damaged.
    """
    return json.loads(content) if is_json(content) else read_ubjson(content)


def read_xgboost_head(learner: Mapping[str, Any]) -> Head:
    """Read the ``learner`` of a parsed model.

    Raises:
        LookupError, TypeError, ValueError: the number of features is missing, or a value is not a number.
    """
    about = learner["learner_model_param"]
    return Head(
        str(learner["objective"]["name"]),
        int(about["num_feature"]),
        max(1, int(about.get("num_class", 0))),
        max(1, int(about.get("num_target", 1))),
    )


def read_fields(lines: str) -> dict[str, str]:
    """Parse ``key=value`` lines of LightGBM's text format: those of the header, or of one tree."""
    pairs = (line.strip().partition("=") for line in lines.splitlines())
    return {key: value for key, mark, value in pairs if mark}


def read_lightgbm_head(fields: Mapping[str, str]) -> Head:
    """Read the header of a model in LightGBM's text format; the objective includes its parameters.

    Raises:
        LookupError, ValueError: the number of features is missing, or a value is not a number.
    """
    num_features, num_classes = int(fields["max_feature_idx"]) + 1, int(fields.get("num_class", "1"))
    return Head(fields.get("objective", "").strip(), num_features, num_classes)
