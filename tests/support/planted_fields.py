"""Mistakes in the text of a configuration."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, Edit, change, changes, config

FIRST = "first/config.pbtxt"
REFUSED = "failed to read text proto"
OURS: dict[str, Edit] = {"first/1/model.py": MODEL + "\n\nimport shoal.kit.component  # noqa\n"}

PLANTS = (
    page("config-syntax", core=REFUSED),
    page("parameter-value", core="Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: false", model="first"),
    page("parameter-misspelt"),
    page("parameter-unusable", good=OURS),
    page("unknown-field", core=REFUSED),
    page("field-unknown-to-target", core=REFUSED, target="embedded"),
    page("misspelt-field", core=REFUSED),
    page("field-newer-than-target", "all/config.pbtxt", core=REFUSED, target="embedded"),
    page("template-leftover", core=REFUSED),
    page("template-leftover-in-text"),
    page("config-unreadable"),
    *changes(
        FIRST,
        ("config-syntax", "a brace too few", "kind: KIND_CPU } ]", "kind: KIND_CPU ]", REFUSED, ""),
        ("config-syntax", "a field twice", "dynamic", "max_batch_size: 4\ndynamic", REFUSED),
        ("misspelt-field", "a mistyped field within", "dims: [ 4 ] }\noutput", "dim: [ 4 ] }\noutput", REFUSED),
        ("config-syntax", "a space that does not break", "max_batch_size: 8", "max_batch_size:\u00a08", REFUSED),
        (
            "config-syntax",
            "an escape that is none",
            "dynamic",
            'parameters { key: "p" value { string_value: "\\d+" } }\ndynamic',
            REFUSED,
        ),
    ),
    change(
        "all/config.pbtxt",
        "config-syntax",
        "batching in an ensemble",
        "ensemble_scheduling",
        "dynamic_batching { }\nensemble_scheduling",
        REFUSED,
        "ensemble_scheduling",
    ),
    *(
        change(
            FIRST,
            "config-syntax",
            f"the number {number}",
            "max_queue_size: 64",
            f"max_queue_size: {number}",
            REFUSED,
            "max_queue_size",
        )
        for number in ("6_4", "+64", "0b1", "0o7")
    ),
    *(
        change(
            FIRST,
            "parameter-unusable",
            f"{name} of another kind, {bad}",
            f'"{good}" }}',
            f'"{bad}" }}',
            "",
            f'"{bad}"',
            good={
                FIRST: config("first") + f'parameters {{ key: "{name}" value {{ string_value: "{good}" }} }}\n',
                **OURS,
            },
        )
        for name, good, bad in (
            ("hang_seconds", "3", "nan"),
            ("load_seconds", "60", "a minute"),
            ("public", "true", "maybe"),
            ("slots", "8", "x"),
            ("threads", "2", "two"),
            ("threads", "2", "0.5"),
        )
    ),
    change(
        FIRST,
        "field-unknown-to-target",
        "a group's type",
        "kind: KIND_CPU",
        "type: KIND_CPU kind: KIND_CPU",
        REFUSED,
        target="24.10",
    ),
)
