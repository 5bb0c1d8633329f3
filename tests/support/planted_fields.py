"""Mistakes in the text of a configuration."""

from __future__ import annotations

from tests.support.planted import MODEL, ON_PAGE, Plant, config

FIRST = "first/config.pbtxt"
REFUSED = "failed to read text proto"

PLANTS = (
    Plant(
        "a dtype without TYPE_",
        "config-syntax",
        FIRST,
        "data_type: FP32",
        {FIRST: ("data_type: TYPE_FP32", "data_type: FP32")},
        core=REFUSED,
    ),
    Plant(
        "a brace too few", "config-syntax", FIRST, "", {FIRST: ("kind: KIND_CPU } ]", "kind: KIND_CPU ]")}, core=REFUSED
    ),
    Plant(
        "a field twice",
        "config-syntax",
        FIRST,
        "max_batch_size: 4",
        {FIRST: ("dynamic", "max_batch_size: 4\ndynamic")},
        core=REFUSED,
    ),
    Plant(
        "batching in an ensemble",
        "config-syntax",
        "all/config.pbtxt",
        "ensemble_scheduling",
        {"all/config.pbtxt": ("ensemble_scheduling", "dynamic_batching { }\nensemble_scheduling")},
        core=REFUSED,
    ),
    *(
        Plant(
            f"the number {number}",
            "config-syntax",
            FIRST,
            "max_queue_size",
            {FIRST: ("max_queue_size: 64", f"max_queue_size: {number}")},
            core=REFUSED,
        )
        for number in ("6_4", "+64", "0b1", "0o7")
    ),
    Plant(
        "a flag of the Python backend",
        "parameter-value",
        FIRST,
        "FORCE_CPU",
        {FIRST: ON_PAGE},
        {FIRST: config("first") + 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }\n'},
        core="Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: false",
        model="first",
    ),
    Plant(
        "a parameter misspelt",
        "parameter-misspelt",
        FIRST,
        "hang_second",
        {FIRST: ON_PAGE},
        {FIRST: config("first") + 'parameters { key: "hang_seconds" value { string_value: "20" } }\n'},
    ),
    *(
        Plant(
            f"{name} of another kind, {bad}",
            "parameter-unusable",
            FIRST,
            f'"{bad}"',
            {FIRST: (f'"{good}" }}', f'"{bad}" }}')},
            {
                FIRST: config("first") + f'parameters {{ key: "{name}" value {{ string_value: "{good}" }} }}\n',
                "first/1/model.py": MODEL + "\n\nimport shoal.kit.component  # noqa\n",
            },
        )
        for name, good, bad in (
            ("hang_seconds", "3", "-3"),
            ("hang_seconds", "3", "nan"),
            ("load_seconds", "60", "a minute"),
            ("public", "true", "maybe"),
            ("slots", "8", "x"),
            ("threads", "2", "two"),
            ("threads", "2", "0.5"),
        )
    ),
    Plant("a field of tomorrow", "unknown-field", FIRST, "shiny_new_field", {FIRST: ON_PAGE}, core=REFUSED),
    Plant(
        "an optional output",
        "field-unknown-to-target",
        FIRST,
        "optional: true",
        {FIRST: ('output { name: "Y"', 'output { optional: true name: "Y"')},
        core=REFUSED,
        target="embedded",
    ),
    Plant(
        "a group's type",
        "field-unknown-to-target",
        FIRST,
        "type:",
        {FIRST: ("kind: KIND_CPU", "type: KIND_CPU kind: KIND_CPU")},
        core=REFUSED,
        target="24.10",
    ),
    Plant("a mistyped field", "misspelt-field", FIRST, "max_batchsize", {FIRST: ON_PAGE}, core=REFUSED),
    Plant(
        "a mistyped field within",
        "misspelt-field",
        FIRST,
        "dim: [ 4 ]",
        {FIRST: ("dims: [ 4 ] }\noutput", "dim: [ 4 ] }\noutput")},
        core=REFUSED,
    ),
    Plant(
        "a field that the target lacks",
        "field-newer-than-target",
        "all/config.pbtxt",
        "max_inflight_requests",
        {"all/config.pbtxt": ("  step [", "  max_inflight_requests: 8\n  step [")},
        core=REFUSED,
        target="embedded",
    ),
    Plant(
        "a number to fill in",
        "template-leftover",
        FIRST,
        "${batch}",
        {FIRST: ("max_batch_size: 8", "max_batch_size: ${batch}")},
        core=REFUSED,
    ),
    Plant(
        "a text to fill in",
        "template-leftover-in-text",
        FIRST,
        "${path}",
        {FIRST: ("dynamic", 'parameters { key: "p" value { string_value: "${path}" } }\ndynamic')},
    ),
    Plant(
        "a configuration that is a folder", "config-unreadable", FIRST, "", {FIRST: None, f"{FIRST}/note.txt": "Here?"}
    ),
    Plant(
        "a space that does not break",
        "config-syntax",
        FIRST,
        "max_batch_size",
        {FIRST: ("max_batch_size: 8", "max_batch_size:\u00a08")},
        core=REFUSED,
    ),
    Plant(
        "an escape that is none",
        "config-syntax",
        FIRST,
        "string_value",
        {FIRST: ("dynamic", 'parameters { key: "p" value { string_value: "\\d+" } }\ndynamic')},
        core=REFUSED,
    ),
)
