"""Models that answer in pieces: an engine that counts, a pipeline around it, and a model that asks both (BLS)."""

from __future__ import annotations

from pathlib import Path

_TENSOR = '{{ name: "{name}" data_type: {dtype} dims: [ 1 ]{more} }}'
# COUNT answers; DELAY seconds before each; FAIL_AT raises instead of that answer, WRONG_AT gives one of another shape.
_INPUTS = (("COUNT", "TYPE_INT32"), ("DELAY?", "TYPE_FP32"), ("FAIL_AT?", "TYPE_INT32"), ("WRONG_AT?", "TYPE_INT32"))
INPUTS = [name.rstrip("?") for name, _ in _INPUTS]
_CODE = '''
import os, subprocess, sys, threading, time
import numpy as np
from shoal import Component, InputError, StreamingComponent

LEFT = {left!r}

class Count(StreamingComponent):
    """Counts; from a generator."""

    def check(self, inputs):
        if int(inputs["COUNT"].ravel()[0]) < 0:
            raise InputError("COUNT is negative.", "Give 0 or more.")

    def answers(self, inputs, stream):
        given = {{name: float(array.ravel()[0]) for name, array in inputs.items()}}
        stream.on_leave(lambda: self.note(stream))
        for number in range(int(given["COUNT"])):
            time.sleep(given.get("DELAY", 0))
            if number == given.get("FAIL_AT"):
                raise InputError(f"It failed at {{number}}.")
            shape = (2,) if number == given.get("WRONG_AT") else (1,)
            yield {{"NUMBER": np.full((1, *shape) if self.context.spec.is_batched else shape, number, np.int32)}}

    def note(self, stream):
        if LEFT:
            with open(LEFT, "a", encoding="utf-8") as file:
                file.write(f"{{time.time()}}\\n")

class Engine(Count):
    """The same from one thread of its own for all streams, as an engine has it."""

    def setup(self, context):
        if "worker" in context.spec.parameters:
            subprocess.Popen(["sleep", "600"])
        self.streams, self.changed = [], threading.Condition()
        threading.Thread(target=self.work, daemon=True).start()

    def open(self, inputs, stream):
        stream.on_leave(lambda: self.note(stream))
        given = {{name: float(array.ravel()[0]) for name, array in inputs.items()}}
        with self.changed:
            self.streams.append([stream, given, 0, time.monotonic() + given.get("DELAY", 0)])
            self.changed.notify()

    def work(self):
        while True:
            with self.changed:
                self.streams = [each for each in self.streams if each[0].is_open]
                if not self.streams:
                    self.changed.wait()
                streams = list(self.streams)
            now, waiting = time.monotonic(), 1.0
            for each in streams:
                stream, given, number, due = each
                if number >= given["COUNT"]:
                    stream.end()
                elif due > now:
                    waiting = min(waiting, due - now)
                    continue
                elif number == given.get("FAIL_AT"):
                    stream.end(InputError(f"It failed at {{number}}."))
                else:
                    shape = (2,) if number == given.get("WRONG_AT") else (1,)
                    shape = (1, *shape) if self.context.spec.is_batched else shape
                    stream.send({{"NUMBER": np.full(shape, number, np.int32)}})
                    each[2:] = number + 1, due + given.get("DELAY", 0)
                waiting = 0
            time.sleep(waiting)

class Ask(StreamingComponent):
    """Asks the engine named by the parameter calls, and passes on what it says."""

    def answers(self, inputs, stream):
        (engine, *_) = self.context.spec.parameters["calls"].split()
        for answer in self.context.models.stream(engine, dict(inputs), until=stream):
            yield answer

class Plus(Component):
    """Adds the parameter more, if there is any."""

    is_stateful = True

    def run(self, batch):
        more = np.int32(self.context.spec.parameters["more"])
        (source,), (target,) = self.context.spec.inputs, self.context.spec.outputs
        return {{target.name: batch[source.name] + more}}

TritonPythonModel = {component}.for_triton()
'''


def write_model(
    folder: Path, component: str, *, rows: int = 0, left: Path | None = None, lines: str = "", stop: bool = True
) -> None:
    """Write a model of the class ``component``; leavers are noted in the file ``left``."""
    (folder / "1").mkdir(parents=True)
    if component == "Plus":
        inputs, outputs, policy = [("X", "TYPE_INT32")], [("Y", "TYPE_INT32")], ""
    else:
        inputs, outputs = [*_INPUTS, *([("stop?", "TYPE_BOOL")] if stop else [])], [("NUMBER", "TYPE_INT32")]
        policy = "model_transaction_policy { decoupled: true }"
    given, found = (
        ", ".join(
            _TENSOR.format(name=name.rstrip("?"), dtype=dtype, more=" optional: true" if name.endswith("?") else "")
            for name, dtype in each
        )
        for each in (inputs, outputs)
    )
    (folder / "config.pbtxt").write_text(
        f'name: "{folder.name}"\nbackend: "python"\nmax_batch_size: {rows}\n{policy}\n'
        f"input [ {given} ]\noutput [ {found} ]\ninstance_group [ {{ kind: KIND_CPU }} ]\n{lines}\n",
        encoding="utf-8",
    )
    code = _CODE.format(component=component, left=str(left or ""))
    (folder / "1" / "model.py").write_text(code, encoding="utf-8")


def write_counting(repository: Path, left: Path | None = None, *, slots: int = 0, has_worker: bool = False) -> Path:
    """Write ``count``, ``engine``, the ensemble ``count_all`` (plus one, count, plus ten) and ``count_bls``.

    With ``has_worker`` the engine has a process of its own.
    """
    public = 'parameters { key: "public" value: { string_value: "true" } }'
    some = public + (f'parameters {{ key: "slots" value: {{ string_value: "{slots}" }} }}' if slots else "")
    asks = 'parameters { key: "calls" value: { string_value: "engine" } }'
    canary = 'parameters { key: "canary" value: { string_value: "{\\"COUNT\\": [[3]]}" } }'
    write_model(repository / "count", "Count", left=left, lines=some)
    worker = 'parameters { key: "worker" value: { string_value: "yes" } }' if has_worker else ""
    write_model(repository / "engine", "Engine", left=left, lines=some + canary + worker, rows=4)
    write_model(repository / "count_bls", "Ask", lines=public + asks, rows=4)
    for name, more in (("one_more", 1), ("ten_more", 10)):
        parameter = f'parameters {{ key: "more" value: {{ string_value: "{more}" }} }}'
        write_model(repository / name, "Plus", rows=4, lines=parameter)
    maps = "".join(f' input_map {{ key: "{name}" value: "{name}" }}' for name in INPUTS if name != "COUNT")
    inputs = ", ".join(_TENSOR.format(name=name.rstrip("?"), dtype=dtype, more="") for name, dtype in _INPUTS)
    folder = repository / "count_all"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        f"""name: "count_all"
platform: "ensemble"
max_batch_size: 4
input [ {inputs} ]
output [ {_TENSOR.format(name="SUM", dtype="TYPE_INT32", more="")} ]
ensemble_scheduling {{
  step [
    {{ model_name: "one_more" model_version: 1
      input_map {{ key: "X" value: "COUNT" }} output_map {{ key: "Y" value: "more" }} }},
    {{ model_name: "engine" model_version: 1
      input_map {{ key: "COUNT" value: "more" }}{maps} output_map {{ key: "NUMBER" value: "number" }} }},
    {{ model_name: "ten_more" model_version: 1
      input_map {{ key: "X" value: "number" }} output_map {{ key: "Y" value: "SUM" }} }}
  ]
}}
""",
        encoding="utf-8",
    )
    return repository
