"""What Triton's backends read of a configuration, and shoal's backends of the same names do not."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import Edit, Plant
from tests.support.planted_forest import CONFIG, FILE, checkpoint, config, parameter, xgboost

GOOD: dict[str, Edit] = {CONFIG: config(), FILE: checkpoint}


def refused(name: str, line: str, bad: Edit, more: dict[str, Edit] | None = None, file: str = CONFIG) -> Plant:
    return Plant(name, "not-in-own-backend", file, line, {CONFIG: bad, **(more or {})}, GOOD, target="embedded")


PLANTS = (
    page("not-in-own-backend", CONFIG, GOOD, bad={"forest/1/xgboost.json": xgboost}, target="embedded"),
    page("ignored-by-own-backend", CONFIG, GOOD, target="embedded"),
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
)
