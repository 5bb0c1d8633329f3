"""What Triton's backends read of a configuration, and shoal's backends of the same names do not."""

from __future__ import annotations

from tests.support.planted import ON_PAGE, Edit, Plant
from tests.support.planted_forest import CONFIG, FILE, checkpoint, config, parameter, xgboost

GOOD: dict[str, Edit] = {CONFIG: config(), FILE: checkpoint}


def refused(name: str, line: str, bad: Edit, more: dict[str, Edit] | None = None, file: str = CONFIG) -> Plant:
    return Plant(name, "not-in-own-backend", file, line, {CONFIG: bad, **(more or {})}, GOOD, target="embedded")


PLANTS = (
    refused("another format of forests", "model_type", config("xgboost_json"), {"forest/1/xgboost.json": xgboost}),
    refused(
        "explanations",
        "treeshap_output",
        ("instance_group", 'output { name: "treeshap_output" data_type: TYPE_FP32 dims: [ 6 ] }\ninstance_group'),
    ),
    refused("an input that may be left out", "optional", ("TYPE_FP32 dims", "TYPE_FP32 optional: true dims")),
    refused("another shape inside", "reshape", ("[ 5 ] }", "[ 5 ] reshape { shape: [ 5, 1 ] } }")),
    refused(
        "the sizes of a batch",
        "batch_input",
        (
            "instance_group",
            'batch_input { kind: BATCH_ITEM_SHAPE target_name: "S" data_type: TYPE_INT32 source_input: "input__0" }\n'
            "instance_group",
        ),
    ),
    Plant(
        "a setting of speed",
        "ignored-by-own-backend",
        CONFIG,
        "threads_per_tree",
        {CONFIG: config("treelite_checkpoint", parameter("threads_per_tree", "4"))},
        GOOD,
        target="embedded",
    ),
    Plant(
        "a level of optimization",
        "ignored-by-own-backend",
        CONFIG,
        "optimization",
        {CONFIG: ON_PAGE},
        GOOD,
        target="embedded",
    ),
)
