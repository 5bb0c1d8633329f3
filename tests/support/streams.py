"""Models that answer in pieces: an engine that counts, what follows it, and what calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.planted import write

DECOUPLED = "model_transaction_policy { decoupled: true }\n"
# COUNT answers, DELAY seconds apart; a request with `stop` set ends the one of its id.
COUNTS = """import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.count, args=(request, request.get_response_sender())).start()
        return None

    def count(self, request, sender):
        try:
            number = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            delay = pb_utils.get_input_tensor_by_name(request, "DELAY")
            for index in range(number):
                if sender.is_cancelled():
                    break
                time.sleep(0 if delay is None else float(delay.as_numpy()[0]))
                sender.send(pb_utils.InferenceResponse(self.answer(index)))
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
        sender.send(flags=FINAL)

    def answer(self, index):
        return [
            pb_utils.Tensor("NUMBER", np.array([index], np.int32)),
            pb_utils.Tensor("stream_id", np.array([7], np.int64)),
        ]
"""
ADDS = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    is_stateful = True

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "NUMBER").as_numpy()
            stream = pb_utils.get_input_tensor_by_name(request, "stream_id")
            key = 0 if stream is None else int(stream.as_numpy()[0])
            self.sums[key] = self.sums.get(key, 0) + number
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", self.sums[key])]))
        return responses
"""
ASKS = """import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.pass_on(request, request.get_response_sender())
        return None

    def pass_on(self, request, sender):
        count = pb_utils.get_input_tensor_by_name(request, "COUNT")
        asked = pb_utils.InferenceRequest(
            model_name="counts", inputs=[count], requested_output_names=["NUMBER"], request_id="7"
        )
        for answer in asked.exec(decoupled=True):
            if answer.has_error():
                sender.send(pb_utils.InferenceResponse(error=answer.error()))
                break
            if answer.output_tensors():
                sender.send(pb_utils.InferenceResponse(answer.output_tensors()))
        sender.send(flags=FINAL)
"""
GROUP = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
COUNTS_CONFIG = f"""name: "counts"
backend: "python"
max_batch_size: 0
input {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }}
input {{ name: "DELAY" data_type: TYPE_FP32 dims: [ 1 ] optional: true }}
output {{ name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "stream_id" data_type: TYPE_INT64 dims: [ 1 ] }}
{DECOUPLED}parameters {{ key: "slots" value {{ string_value: "16" }} }}
parameters {{ key: "load_seconds" value {{ string_value: "90" }} }}
{GROUP}"""
ADDS_CONFIG = f"""name: "adds"
backend: "python"
max_batch_size: 0
input {{ name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }}
input {{ name: "stream_id" data_type: TYPE_INT64 dims: [ 1 ] optional: true }}
output {{ name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }}
{GROUP}"""
ASKS_CONFIG = f"""name: "asks"
backend: "python"
max_batch_size: 0
input {{ name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] }}
{DECOUPLED}parameters {{ key: "calls" value {{ string_value: "counts" }} }}
{GROUP}"""
SUMS_CONFIG = """name: "sums"
platform: "ensemble"
max_batch_size: 0
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] }
ensemble_scheduling {
  step [
    {
      model_name: "counts"
      model_version: -1
      input_map { key: "COUNT" value: "COUNT" }
      output_map { key: "NUMBER" value: "number" }
      output_map { key: "stream_id" value: "stream" }
    },
    {
      model_name: "adds"
      model_version: -1
      input_map { key: "NUMBER" value: "number" }
      input_map { key: "stream_id" value: "stream" }
      output_map { key: "SUM" value: "SUM" }
    }
  ]
}
"""
# A repository's files: an ensemble whose second step keeps state, and a model that calls the engine.
FILES = {
    "counts/config.pbtxt": COUNTS_CONFIG,
    "counts/1/model.py": COUNTS,
    "adds/config.pbtxt": ADDS_CONFIG,
    "adds/1/model.py": ADDS,
    "asks/config.pbtxt": ASKS_CONFIG,
    "asks/1/model.py": ASKS,
    "sums/config.pbtxt": SUMS_CONFIG,
    "sums/1/.gitkeep": "",
}


def write_project(project: Path) -> Path:
    """Write the same as model folders."""
    for path, text in FILES.items():
        category = {"counts": "models", "sums": "ensembles"}.get(path.partition("/")[0], "postprocess")
        write(project / category / path, text)
    return project


def write_twin(project: Path, name: str, *edits: tuple[str, str], of: str = "counts") -> None:
    """Write another engine beside the one that counts, its configuration edited."""
    text = FILES[f"{of}/config.pbtxt"].replace(f'name: "{of}"', f'name: "{name}"', 1)
    for edit in edits:
        assert edit[0] in text
        text = text.replace(*edit, 1)
    write(project / "models" / name / "config.pbtxt", text)
    write(project / "models" / name / "1" / "model.py", FILES[f"{of}/1/model.py"])


QUIET = {"DELAY": 0.0, "FAIL_AT": -1, "WRONG_AT": -1}
MODELS = {"engine": ("NUMBER", 0), "count_bls": ("NUMBER", 0), "count_all": ("SUM", 10)}  # output, first number


def ask(count: int, **given: float) -> dict[str, Any]:
    return {name: [[x]] for name, x in {**QUIET, **given, "COUNT": count}.items()}


def expected(model: str, count: int) -> list[int]:
    _, first = MODELS[model]
    return list(range(first, first + count + (model == "count_all")))  # its first step adds one
