"""Mistakes in repositories whose models answer in pieces, or call one another."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.page_plants import page
from tests.support.planted import MODEL, Edit, Plant, config
from tests.support.streams import FILES

COUNTS, ADDS, ASKS = "counts/1/model.py", "adds/1/model.py", "asks/1/model.py"
SUMS = "sums/config.pbtxt"
FINAL = "        sender.send(flags=FINAL)\n"
OUTER = FILES[SUMS].replace('name: "sums"', 'name: "outer"').replace('"adds"', '"sums"')
INNER = """name: "sums"
platform: "ensemble"
max_batch_size: 0
input { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }
input { name: "stream_id" data_type: TYPE_INT64 dims: [ 1 ] }
output { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling { step [ {
  model_name: "adds"
  model_version: -1
  input_map { key: "NUMBER" value: "NUMBER" }
  input_map { key: "stream_id" value: "stream_id" }
  output_map { key: "SUM" value: "SUM" }
} ] }
"""
NESTED: dict[str, Edit] = {"outer/config.pbtxt": OUTER, "outer/1/.gitkeep": "", SUMS: INNER}
VLLM = 'name: "vllm"\nbackend: "vllm"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
COMPONENT = """import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from shoal import Component, StreamingComponent


class Counts(StreamingComponent):
    def answers(self, inputs, stream):
        for number in range(int(inputs["COUNT"][0])):
            yield {"NUMBER": number}


TritonPythonModel = Counts.for_triton()
"""
TAKES_ID = 'input { name: "stream_id" data_type: TYPE_INT64 dims: [ 1 ] optional: true }\n'
UNNUMBERED = "".join(line for line in FILES[SUMS].splitlines(keepends=True) if "stream_id" not in line)
NO_ENSEMBLE: dict[str, Edit] = {SUMS: None, "sums/1/.gitkeep": None}
ASKED_FIRST = """        has_left = sender.is_cancelled()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def named(name: str) -> dict[str, Edit]:
    """A model that no ensemble calls."""
    return {f"{name}/config.pbtxt": config(name), f"{name}/1/model.py": MODEL}


def plant(
    name: str,
    rule: str,
    file: str,
    line: str,
    bad: Mapping[str, Edit],
    good: Mapping[str, Edit] | None = None,
    target: str | None = None,
) -> Plant:
    """A mistake in the repository of `tests.support.streams`, beside the usual one."""
    edited = {p: FILES[p].replace(*e, 1) if isinstance(e, tuple) else e for p, e in (good or {}).items()}
    return Plant(name, rule, file, line, bad, {**FILES, **edited}, target=target)


PLANTS = (
    page("stream-state-divided", "adds/config.pbtxt", FILES),
    page("calls-unknown", good={**named("prompt"), **named("llm-hf")}),
    page("vllm-batch-size", "vllm/config.pbtxt", {"vllm/config.pbtxt": VLLM, "vllm/1/model.json": '{"model": "m"}'}),
    page("engine-batched-twice", "counts/config.pbtxt", FILES),
    page("cancelled-after-final", COUNTS, {**FILES, COUNTS: FILES[COUNTS].replace(FINAL, ASKED_FIRST)}),
    page("async-exec-decoupled", ASKS, {**FILES, ASKS: FILES[ASKS].replace("def pass_on", "async def pass_on")}),
    page("decoupled-mismatch", at=COUNTS, line="class Counts", good={**FILES, COUNTS: COMPONENT}),
    plant(
        "state on two GPUs",
        "stream-state-divided",
        "adds/config.pbtxt",
        "instance_group",
        {"adds/config.pbtxt": ("gpus: [ 0 ]", "gpus: [ 0, 1 ]")},
        {"adds/config.pbtxt": ("kind: KIND_CPU", "kind: KIND_GPU gpus: [ 0 ]")},
    ),
    plant(
        "state in two groups, said in the class alone",
        "stream-state-divided",
        "adds/config.pbtxt",
        "instance_group",
        {"adds/config.pbtxt": ("{ count: 1 kind: KIND_CPU }", "{ kind: KIND_CPU }, { kind: KIND_CPU }")},
        {
            "adds/config.pbtxt": (TAKES_ID, ""),
            SUMS: UNNUMBERED,
            ADDS: ('pb_utils.get_input_tensor_by_name(request, "stream_id")', "None"),
        },
    ),
    plant(
        "two instances with a typed mark of state",
        "stream-state-divided",
        "adds/config.pbtxt",
        "count: 3",
        {"adds/config.pbtxt": ("count: 1", "count: 3")},
        {ADDS: ("is_stateful = True", "is_stateful: bool = True")},
    ),
    plant(
        "two instances with state, one level down",
        "stream-state-divided",
        "adds/config.pbtxt",
        "instance_group",
        {"adds/config.pbtxt": ("count: 1", "count: 2")},
        NESTED,
    ),
    plant("a stream number that is not mapped", "stream-id-unmapped", SUMS, "{", {SUMS: UNNUMBERED}),
    plant(
        "a stream number that is not mapped, one level down",
        "stream-id-unmapped",
        SUMS,
        "{",
        {SUMS: ('  input_map { key: "stream_id" value: "stream_id" }\n', "")},
        NESTED,
    ),
    plant(
        "a decoupled ensemble on an old server",
        "leaving-client",
        SUMS,
        "counts",
        {path: FILES[path] for path in NO_ENSEMBLE},
        NO_ENSEMBLE,
        target="embedded",
    ),
    plant(
        "sequences before an engine",
        "engine-batched-twice",
        "counts/config.pbtxt",
        "sequence_batching",
        {"counts/config.pbtxt": ("instance_group", "sequence_batching { }\ninstance_group")},
        NO_ENSEMBLE,
    ),
    plant(
        "an error that ends the answers",
        "error-with-final",
        COUNTS,
        "FINAL",
        {COUNTS: ("(str(error))))", "(str(error))), flags=FINAL)")},
    ),
)
