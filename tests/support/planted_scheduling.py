"""Mistakes in batching, queues, instances, caches, sequences."""

from __future__ import annotations

from tests.support.page_plants import page
from tests.support.planted import MODEL, SENDS, Edit, Plant, change, changes, config

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
UNCACHED = "Response Cache does not currently support"
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
    page("negative-batch-size", ALONE, sequences(""), core="must be non-negative"),
    page("preferred-batch-size", core="preferred size must be <= max batch size"),
    page("priority-level", core="default priority level must be in range"),
    page("ordering-and-priority", core="Only one priority level is allowed"),
    page("gpus-without-gpu", core="has kind KIND_CPU but specifies"),
    page("kind-unsupported", ALONE, component('library = "numpy"')),
    page("passive-instances"),
    page("profile-without-tensorrt", core="specifies profile field which is only supported for TensorRT models"),
    page("cache-on-uncacheable", good={"first/1/model.py": SENDS}, core=UNCACHED),
    page(
        "no-backend",
        bad={"first/1/model.py": None, "first/1/.gitkeep": ""},
        core="with no backend|must specify|unable to find",
    ),
    page("misspelt-backend", core="unable to find backend library"),
    page("metric-control"),
    page("sequence-control", ALONE, sequences(), core="must specify either 'int32_false_true'"),
    change(
        ALONE, "input-twice", "a control named as an input", '"START"', '"X"', "", "sequence_batching", good=sequences()
    ),
    page("time-too-short", ALONE, good=sequences("")),
    page("state-not-stored", ALONE, good={**sequences(""), "alone/1/model.py": MODEL + '\n\nSTATE = "B"\n'}),
    page("sequence-state", ALONE, sequences(""), core="doesn't match 'state' dim description. 3 != 2"),
    page("kind-left-open"),
    change(
        FIRST,
        "preferred-batch-size",
        "a preferred size of 0",
        "8 ]",
        "0 ]",
        "preferred size must be positive",
        "preferred",
        good=first(QUEUE, f"preferred_batch_size: [ 8 ] {QUEUE}"),
    ),
    change(
        FIRST,
        "priority-level",
        "a policy of no level",
        "key: 2",
        "key: 3",
        "priority queue policy must have priority level in range",
        "priority_queue_policy",
        good=first(
            QUEUE,
            f"priority_levels: 2 default_priority_level: 1 priority_queue_policy {{ key: 2 value {{ }} }} {QUEUE}",
        ),
    ),
    change(
        FIRST,
        "ordering-and-priority",
        "order and delay",
        "default_queue",
        "preserve_ordering: true default_queue",
        "can not have DELAY as timeout action",
        good=first("64 }", "64 timeout_action: DELAY default_timeout_microseconds: 9 }"),
    ),
    *changes(
        FIRST,
        (
            "platform-and-backend",
            "a platform called python",
            "backend",
            "platform",
            "unexpected platform type 'python'",
        ),
        ("gpus-without-gpu", "a GPU below 0", "KIND_CPU }", "KIND_GPU gpus: [ -1 ] }"),
        (
            "gpus-without-gpu",
            "a GPU of the model's",
            "KIND_CPU }",
            "KIND_MODEL gpus: [ 0 ] }",
            "has kind KIND_MODEL but specifies",
        ),
        (
            "platform-and-backend",
            "an engine and another",
            'backend: "python"',
            'platform: "pytorch_libtorch"\nbackend: "onnxruntime"',
            "unexpected 'platform' and 'backend' pair",
        ),
        ("kind-left-open", "a place left to Triton", "KIND_CPU", "KIND_AUTO", "", "instance_group"),
    ),
    change(
        ALONE,
        "sequence-control",
        "a sequence's number without a type",
        "data_type: TYPE_UINT64 } ] }",
        "} ] }",
        "unexpected data type for control CONTROL_SEQUENCE_CORRID",
        "control_input",
        good=sequences(
            'sequence_batching { control_input [ { name: "C" control [ {\n'
            "  kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ] }\n"
        ),
        model="alone",
    ),
    *(
        change(
            f"{cached}/config.pbtxt",
            "cache-on-uncacheable",
            f"a cache of many answers, {name}",
            "platform",
            "response_cache { enable: true }\nplatform",
            UNCACHED,
            model=cached,
            good={
                **first("instance_group", DECOUPLED),
                "first/1/model.py": SENDS,
                **{f"{each}/1/.gitkeep": "" for each in ("all", "inner", "outer")},
                "all/config.pbtxt": wrap("all", "outer"),
                "outer/config.pbtxt": wrap("outer", "inner"),
                "inner/config.pbtxt": wrap("inner", "first"),
            },
        )
        for name, cached in (("of a step", "inner"), ("of a step's step", "outer"))
    ),
    *changes(
        ALONE,
        (
            "cache-on-uncacheable",
            "a cache of sequences",
            "instance_group",
            "response_cache { enable: true }\ninstance_group",
            UNCACHED,
        ),
        (
            "sequence-control",
            "a control of three values",
            "[ 0, 1 ]",
            "[ 0, 1, 2 ]",
            "must have exactly 2 entries",
            "START",
        ),
        (
            "sequence-control",
            "a control without name",
            'name: "START"',
            "",
            "control tensor must have a name",
            "control_input",
        ),
        (
            "sequence-control",
            "two starts",
            "sequence_batching {\n",
            "sequence_batching {\n"
            '  control_input { name: "A" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }\n',
            "specifies multiple CONTROL_SEQUENCE_START",
            "control_input",
        ),
        good=sequences(),
        model="alone",
    ),
    *changes(
        FIRST,
        ("metric-control", "a metric without buckets", "buckets: [ 1 ]", "", "", "metric_control"),
        ("metric-control", "a metric without family", 'family: "f"', "", "", "metric_control"),
        good=first("dynamic", METRIC + "dynamic"),
    ),
    *(
        change(
            ALONE,
            "sequence-state",
            f"an initial state {name}",
            old,
            new,
            core,
            "initial_state",
            model="alone",
            good={**sequences(STATE), "alone/initial_state/data": "12345678"},
        )
        for name, old, new, core in (
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
        "a component of any device, on a GPU that Triton takes for one",
        "kind-unsupported",
        ALONE,
        "instance_group",
        {"alone/1/model.py": COMPONENT.replace("LINE", 'library: str = "numpy"')},
        {**component("library = 'cupy'"), ALONE: config("alone").replace("KIND_CPU", "KIND_AUTO gpus: [ 0 ]")},
    ),
    change(
        ALONE,
        "kind-unsupported",
        "a component whose devices its backend chooses",
        "KIND_CPU",
        "KIND_MODEL",
        "",
        "instance_group",
        good=component('library = "torch"'),
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
        change(
            FIRST,
            "misspelt-backend",
            f"a {field} called {name}",
            'backend: "python"',
            f'backend: "{name}"' if field == "backend" else f'backend: "python"\nruntime: "{name}"',
            "unable to find backend library",
            f'{field}: "{name}"',
        )
        for field, name in (
            ("backend", "Python"),
            ("backend", "phyton"),
            ("backend", "onnx_runtime"),
            ("backend", "tensorflw"),
            ("runtime", "modle.py"),
            ("runtime", "libtriton_pyhton.so"),
        )
    ),
)
