"""A model that answers in pieces, for tests of clients."""

from __future__ import annotations

from pathlib import Path

# COUNT answers, BASE and up, DELAY seconds apart, the first after FIRST seconds; FAIL is an error instead of that
# answer, or after the last. TEXT has SIZE bytes. COUNT -1 asks how many clients of this BASE
# have left so far.
CODE = """
import collections, threading
import numpy as np
from shoal import InputError, StreamingComponent


class Counts(StreamingComponent):
    def setup(self, context):
        self.outputs = [tensor.name for tensor in context.spec.outputs]
        self.num_left = collections.Counter()

    def answers(self, inputs, stream):
        given = {name: array.ravel()[0].item() for name, array in inputs.items()}
        count, fail, base, left = given["COUNT"], given.get("FAIL"), given.get("BASE", 0), threading.Event()
        if count == -1:
            yield self.answer(self.num_left[base], given)
            return

        def leave():
            self.num_left[base] += 1
            left.set()

        stream.on_leave(leave)
        for number in range(count):
            if left.wait(given.get("DELAY" if number else "FIRST", 0)):
                return
            if number == fail:
                break
            yield self.answer(base + number, given)
        if fail is not None:
            raise InputError(f"It failed at {fail}.")

    def answer(self, number, given):
        text = str(number).encode() + b" " * given.get("SIZE", 1)
        tensors = {"NUMBER": np.array([[number]], np.int32), "TEXT": np.array([[text]], np.object_)}
        return {name: tensors[name] for name in self.outputs}


TritonPythonModel = Counts.for_triton()
"""
INPUTS = {
    "COUNT": "INT32", "BASE": "INT32", "DELAY": "FP32", "FIRST": "FP32", "FAIL": "INT32", "SIZE": "INT32",
    "stop": "BOOL",
}  # fmt: skip
OUTPUTS = {"NUMBER": "INT32", "TEXT": "STRING"}


def write_counts(repository: Path, slots: int = 0) -> None:
    """Write ``counts``, and ``tells``, which gives the text alone; each runs ``slots`` streams at once, if given."""
    for name, outputs in (("counts", ["NUMBER", "TEXT"]), ("tells", ["TEXT"])):
        lines = ['backend: "python" max_batch_size: 4 model_transaction_policy { decoupled: true }']
        for tensor, dtype in INPUTS.items():
            more = "" if tensor == "COUNT" else "optional: true"
            lines.append(f'input {{ name: "{tensor}" data_type: TYPE_{dtype} dims: [ 1 ] {more} }}')
        lines += [f'output {{ name: "{out}" data_type: TYPE_{OUTPUTS[out]} dims: [ 1 ] }}' for out in outputs]
        if slots:
            lines.append(f'parameters {{ key: "slots" value {{ string_value: "{slots}" }} }}')
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(CODE, encoding="utf-8")
        config = "\n".join([*lines, "instance_group { kind: KIND_CPU }\n"])
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
