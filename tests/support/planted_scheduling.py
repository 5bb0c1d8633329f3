"""Mistakes in batching, queues, instances, caches, sequences."""

from __future__ import annotations

from tests.support.planted import MODEL, ON_PAGE, SENDS, Edit, Plant, config

FIRST = "first/config.pbtxt"
ALONE = "alone/config.pbtxt"
QUEUE = "default_queue_policy { max_queue_size: 64 }"
DECOUPLED = "model_transaction_policy { decoupled: true }\ninstance_group"
SEQUENCE = """sequence_batching {
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] } ]
}
"""
# Beside control inputs, Triton 24.10 aborts at an initial state that it refuses.
STATE = """sequence_batching {
  state [ {
    input_name: "A" output_name: "B" data_type: TYPE_FP32 dims: [ 2 ]
    initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true }
  } ]
}
"""
COMPONENT = """from shoal import Component


class Double(Component):
    LINE

    def run(self, batch):
        return {"Y": batch["X"] * 2}


TritonPythonModel = Double.for_triton()
"""
METRIC = (
    'model_metrics { metric_control [ { metric_identifier { family: "f" } histogram_options { buckets: [ 1 ] } } ] }\n'
)


def first(old: str, new: str) -> dict[str, Edit]:
    return {FIRST: (old, new)}


def alone(old: str, new: str) -> dict[str, Edit]:
    return {ALONE: (old, new)}


def sequences(batching: str = SEQUENCE) -> dict[str, Edit]:
    """A model with sequences, which no ensemble calls."""
    return {ALONE: config("alone", batching=batching), "alone/1/model.py": MODEL}


def component(line: str) -> dict[str, Edit]:
    """A component of shoal with a line in its class, which no ensemble calls."""
    return {ALONE: config("alone"), "alone/1/model.py": COMPONENT.replace("LINE", line)}


def wrap(name: str, member: str) -> str:
    """Write an ensemble with one step."""
    return f"""name: "{name}"
platform: "ensemble"
max_batch_size: 8
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }} ]
ensemble_scheduling {{
  step {{
    model_name: "{member}"
    model_version: -1
    input_map {{ key: "X" value: "X" }}
    output_map {{ key: "Y" value: "Y" }}
  }}
}}
"""


PLANTS = (
    Plant(
        "a negative batch size",
        "negative-batch-size",
        FIRST,
        "max_batch_size",
        first("size: 8", "size: -1"),
        core="must be non-negative",
    ),
    Plant(
        "a preferred size above the largest",
        "preferred-batch-size",
        FIRST,
        "preferred",
        first("8 ]", "16 ]"),
        first(QUEUE, f"preferred_batch_size: [ 8 ] {QUEUE}"),
        core="preferred size must be <= max batch size",
    ),
    Plant(
        "a preferred size of 0",
        "preferred-batch-size",
        FIRST,
        "preferred",
        first("8 ]", "0 ]"),
        first(QUEUE, f"preferred_batch_size: [ 8 ] {QUEUE}"),
        core="preferred size must be positive",
    ),
    Plant(
        "levels without a default",
        "priority-level",
        FIRST,
        "priority_levels",
        first("default_priority_level: 1 ", ""),
        first(QUEUE, f"priority_levels: 2 default_priority_level: 1 {QUEUE}"),
        core="default priority level must be in range",
    ),
    Plant(
        "a policy of no level",
        "priority-level",
        FIRST,
        "priority_queue_policy",
        first("key: 2", "key: 3"),
        first(
            QUEUE,
            f"priority_levels: 2 default_priority_level: 1 priority_queue_policy {{ key: 2 value {{ }} }} {QUEUE}",
        ),
        core="priority queue policy must have priority level in range",
    ),
    Plant(
        "order and priorities",
        "ordering-and-priority",
        FIRST,
        "preserve_ordering",
        first(QUEUE, f"preserve_ordering: true {QUEUE}"),
        first(QUEUE, f"priority_levels: 2 default_priority_level: 1 {QUEUE}"),
        core="Only one priority level is allowed",
    ),
    Plant(
        "order and delay",
        "ordering-and-priority",
        FIRST,
        "preserve_ordering",
        first("default_queue", "preserve_ordering: true default_queue"),
        first("64 }", "64 timeout_action: DELAY default_timeout_microseconds: 9 }"),
        core="can not have DELAY as timeout action",
    ),
    Plant(
        "a GPU of the CPU's",
        "gpus-without-gpu",
        FIRST,
        "gpus",
        {FIRST: ON_PAGE},
        core="has kind KIND_CPU but specifies",
    ),
    Plant(
        "a profile of Python's",
        "profile-without-tensorrt",
        FIRST,
        "profile",
        {FIRST: ON_PAGE},
        core="specifies profile field which is only supported for TensorRT models",
    ),
    Plant(
        "a platform called python",
        "platform-and-backend",
        FIRST,
        "platform",
        first("backend", "platform"),
        core="unexpected platform type 'python'",
    ),
    Plant(
        "a sequence's number without a type",
        "sequence-control",
        ALONE,
        "control_input",
        alone("data_type: TYPE_UINT64 } ] }", "} ] }"),
        sequences(
            'sequence_batching { control_input [ { name: "C" control [ {\n'
            "  kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }\n"
        ),
        core="unexpected data type for control CONTROL_SEQUENCE_CORRID",
        model="alone",
    ),
    Plant("a GPU below 0", "gpus-without-gpu", FIRST, "gpus", first("KIND_CPU }", "KIND_GPU gpus: [ -1 ] }")),
    Plant(
        "a GPU of the model's",
        "gpus-without-gpu",
        FIRST,
        "gpus",
        first("KIND_CPU }", "KIND_MODEL gpus: [ 0 ] }"),
        core="has kind KIND_MODEL but specifies",
    ),
    Plant(
        "a cache of many answers",
        "cache-on-uncacheable",
        FIRST,
        "response_cache",
        {FIRST: ON_PAGE},
        {**first("instance_group", DECOUPLED), "first/1/model.py": SENDS},
        core="Response Cache does not currently support",
    ),
    *(
        Plant(
            f"a cache of many answers, {name}",
            "cache-on-uncacheable",
            f"{cached}/config.pbtxt",
            "response_cache",
            {f"{cached}/config.pbtxt": ("platform", "response_cache { enable: true }\nplatform")},
            {
                **first("instance_group", DECOUPLED),
                "first/1/model.py": SENDS,
                **{f"{each}/1/.gitkeep": "" for each in ("all", "inner", "outer")},
                "all/config.pbtxt": wrap("all", "outer"),
                "outer/config.pbtxt": wrap("outer", "inner"),
                "inner/config.pbtxt": wrap("inner", "first"),
            },
            core="Response Cache does not currently support",
            model=cached,
        )
        for name, cached in (("of a step", "inner"), ("of a step's step", "outer"))
    ),
    Plant(
        "a cache of sequences",
        "cache-on-uncacheable",
        ALONE,
        "response_cache",
        alone("instance_group", "response_cache { enable: true }\ninstance_group"),
        sequences(),
        core="Response Cache does not currently support",
        model="alone",
    ),
    Plant(
        "nothing that runs it",
        "no-backend",
        FIRST,
        "",
        {FIRST: ON_PAGE, "first/1/model.py": None, "first/1/.gitkeep": ""},
        core="with no backend|must specify|unable to find",
    ),
    Plant(
        "an engine and another",
        "platform-and-backend",
        FIRST,
        "platform",
        first('backend: "python"', 'platform: "pytorch_libtorch"\nbackend: "onnxruntime"'),
        core="unexpected 'platform' and 'backend' pair",
    ),
    Plant(
        "a metric without buckets",
        "metric-control",
        FIRST,
        "metric_control",
        first("buckets: [ 1 ]", ""),
        first("dynamic", METRIC + "dynamic"),
    ),
    Plant(
        "a metric without family",
        "metric-control",
        FIRST,
        "metric_control",
        first('family: "f"', ""),
        first("dynamic", METRIC + "dynamic"),
    ),
    *(
        Plant(
            f"an initial state {name}",
            "sequence-state",
            ALONE,
            "initial_state",
            alone(old, new),
            {**sequences(STATE), "alone/initial_state/data": "12345678"},
            core=core,
            model="alone",
        )
        for name, old, new, core in (
            ("of another size", "[ 2 ] zero", "[ 3 ] zero", "doesn't match 'state' dim description. 3 != 2"),
            ("of another rank", "[ 2 ] zero", "[ 2, 1 ] zero", "doesn't match the size of 'state' dimensions"),
            ("of any size", "[ 2 ] zero", "[ -1 ] zero", "contains variable dimensions"),
            (
                "of another dtype",
                "TYPE_FP32 dims: [ 2 ] zero",
                "TYPE_INT32 dims: [ 2 ] zero",
                "does not match the state data",
            ),
            ("without a name", 'name: "zero"', "", "Field 'name' must be set when using initial_state"),
            ("without data", "zero_data: true", "", "to have state_data set"),
            ("in a file that is not there", "zero_data: true", 'data_file: "none"', "initial_state/none"),
        )
    ),
    Plant(
        "a control without values",
        "sequence-control",
        ALONE,
        "START",
        alone("int32_false_true: [ 0, 1 ]", ""),
        sequences(),
        core="must specify either 'int32_false_true'",
        model="alone",
    ),
    Plant(
        "a control of three values",
        "sequence-control",
        ALONE,
        "START",
        alone("[ 0, 1 ]", "[ 0, 1, 2 ]"),
        sequences(),
        core="must have exactly 2 entries",
        model="alone",
    ),
    Plant(
        "a control without name",
        "sequence-control",
        ALONE,
        "control_input",
        alone('name: "START"', ""),
        sequences(),
        core="control tensor must have a name",
        model="alone",
    ),
    Plant(
        "two starts",
        "sequence-control",
        ALONE,
        "control_input",
        alone(
            "sequence_batching {\n",
            "sequence_batching {\n"
            '  control_input { name: "A" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }\n',
        ),
        sequences(),
        core="specifies multiple CONTROL_SEQUENCE_START",
        model="alone",
    ),
    Plant("a place left open", "kind-left-open", FIRST, "", {FIRST: ON_PAGE}),
    Plant("a place left to Triton", "kind-left-open", FIRST, "instance_group", first("KIND_CPU", "KIND_AUTO")),
    Plant(
        "a component that computes on the host, on a GPU",
        "kind-unsupported",
        ALONE,
        "instance_group",
        {ALONE: ON_PAGE},
        component('library = "numpy"'),
    ),
    Plant(
        "a component of any device, on a GPU that Triton takes for one",
        "kind-unsupported",
        ALONE,
        "instance_group",
        {"alone/1/model.py": COMPONENT.replace("LINE", 'library: str = "numpy"')},
        {**component("library = 'cupy'"), ALONE: config("alone").replace("KIND_CPU", "KIND_AUTO gpus: [ 0 ]")},
    ),
    Plant(
        "a component whose devices its backend chooses",
        "kind-unsupported",
        ALONE,
        "instance_group",
        alone("KIND_CPU", "KIND_MODEL"),
        component('library = "torch"'),
    ),
    Plant(
        "a misspelt backend with a runtime",
        "misspelt-backend",
        FIRST,
        'backend: "pytroch"',
        {
            **first('backend: "python"', 'backend: "pytroch"\nruntime: "model.py"'),
            "first/1/model.py": None,
            "first/1/model.pt": "",
        },
        core="backend library 'model.py' for model 'first', searched",
    ),
    *(
        Plant(
            f"a {field} called {name}",
            "misspelt-backend",
            FIRST,
            f'{field}: "{name}"',
            first(
                'backend: "python"',
                f'backend: "{name}"' if field == "backend" else f'backend: "python"\nruntime: "{name}"',
            ),
            core="unable to find backend library",
        )
        for field, name in (
            ("backend", "pyhton"),
            ("backend", "Python"),
            ("backend", "phyton"),
            ("backend", "onnx_runtime"),
            ("backend", "tensorflw"),
            ("runtime", "modle.py"),
            ("runtime", "libtriton_pyhton.so"),
        )
    ),
)
