"""A plain model that answers in pieces, for tests of clients."""

from __future__ import annotations

from pathlib import Path

# COUNT answers, BASE and up, DELAY seconds apart, the first after FIRST seconds; FAIL is an error instead of that
# answer, or after the last. TEXT has SIZE bytes. COUNT -1 asks how many clients have left so far.
CODE = """
import json, threading, time
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def initialize(self, args):
        self.outputs = [entry["name"] for entry in json.loads(args["model_config"])["output"]]
        self.num_left = 0

    def execute(self, requests):
        for request in requests:
            given = {tensor.name(): tensor.as_numpy().ravel()[0].item() for tensor in request.inputs()}
            threading.Thread(target=self.count, args=[request.get_response_sender(), given]).start()

    def count(self, sender, given):
        count, fail = given["COUNT"], given.get("FAIL")
        if count == -1:
            sender.send(self.answer(self.num_left, given))
            count = 0
        for number in range(count):
            if self.has_left(sender, given.get("DELAY" if number else "FIRST", 0)):
                self.num_left += 1
                break
            if number == fail:
                break
            sender.send(self.answer(given.get("BASE", 0) + number, given))
        if fail is not None:
            sender.send(pb.InferenceResponse(error=pb.TritonError(f"It failed at {fail}.", pb.TritonError.INVALID_ARG)))
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)  # is_cancelled must not be asked after this

    def answer(self, number, given):
        text = str(number).encode() + b" " * given.get("SIZE", 1)
        tensors = {"NUMBER": np.array([[number]], np.int32), "TEXT": np.array([[text]], np.object_)}
        return pb.InferenceResponse([pb.Tensor(name, tensors[name]) for name in self.outputs])

    def has_left(self, sender, seconds):
        end = time.monotonic() + seconds
        while not sender.is_cancelled():
            if time.monotonic() >= end:
                return False
            time.sleep(min(seconds, 0.01))
        return True
"""
INPUTS = {"COUNT": "INT32", "BASE": "INT32", "DELAY": "FP32", "FIRST": "FP32", "FAIL": "INT32", "SIZE": "INT32"}
OUTPUTS = {"NUMBER": "INT32", "TEXT": "STRING"}


def write_counts(repository: Path) -> None:
    """Write ``counts``, and ``tells``, which gives the text alone."""
    for name, outputs in (("counts", ["NUMBER", "TEXT"]), ("tells", ["TEXT"])):
        lines = ['backend: "python" max_batch_size: 4 model_transaction_policy { decoupled: true }']
        for tensor, dtype in INPUTS.items():
            more = "" if tensor == "COUNT" else "optional: true"
            lines.append(f'input {{ name: "{tensor}" data_type: TYPE_{dtype} dims: [ 1 ] {more} }}')
        lines += [f'output {{ name: "{out}" data_type: TYPE_{OUTPUTS[out]} dims: [ 1 ] }}' for out in outputs]
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.py").write_text(CODE, encoding="utf-8")
        config = "\n".join([*lines, "instance_group { kind: KIND_CPU }\n"])
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
