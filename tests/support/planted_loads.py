"""Models with mistakes that only a server finds, and odd models without one, for ``shoal check --load``.

The line with the mistake ends with ``# here``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

INPUT = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]'
CONFIG = f"""backend: "python"
max_batch_size: 8
{INPUT}
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
"""
TEXT = CONFIG.replace("TYPE_FP32 dims: [ 4 ]", "TYPE_STRING dims: [ 1 ]")
DECOUPLED = f"{CONFIG}model_transaction_policy {{ decoupled: true }}\n"
BATCHING = f"{CONFIG}dynamic_batching {{ }}\n"
CONTROL = 'name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }'
SEQUENCE = f"{CONFIG}sequence_batching {{ control_input [ {{ {CONTROL} }} ] }}\n"
MODEL = """import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        INITIALIZE

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            BODY
        return responses
"""
ANSWER = 'responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))'
START = 'start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()[0, 0]'
LAST = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
ASK = """request = pb_utils.InferenceRequest(
    model_name="plain", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x)]
)
got = request.exec()
y = pb_utils.get_output_tensor_by_name(got, "Y").as_numpy()  # here
"""
COMPONENT = """from shoal import Component, InputError

class Scale(Component):
    def run(self, batch):
        x = batch["X"]
        BODY

TritonPythonModel = Scale.for_triton()
"""


def body(lines: str, code: str = MODEL) -> str:
    """Code that runs ``lines`` for each request, whose input is ``x``."""
    indent = next(line for line in code.splitlines() if line.endswith("BODY")).removesuffix("BODY")
    return code.replace("BODY", lines.replace("\n", f"\n{indent}")).replace("INITIALIZE", "pass")


def y(value: str) -> str:
    """Code that answers ``value``."""
    return body(f"y = {value}\n{ANSWER}")


def initialize(line: str) -> str:
    return y("x").replace("pass", line)


def component(lines: str) -> str:
    return body(lines, COMPONENT)


def stream(lines: str) -> str:
    made = 'sender = request.get_response_sender()\nresponse = pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])'
    return body(f"{made}\n{lines}").replace("return responses", "return None")


# By name: the configuration, the code, and words of what is found.
MISTAKES: Mapping[str, tuple[str, str, str]] = {
    "attribute": (CONFIG, y("x * self.scale  # here"), "has no attribute 'scale'"),
    "as_numpy": (CONFIG, y("x * 2  # here").replace('"X").as_numpy()', '"X")'), "unsupported operand type(s)"),
    "exchanged": (CONFIG, y("x").replace('"Y", y)]))', 'y, "Y")]))  # here'), "incompatible constructor arguments"),
    "np_float": (CONFIG, y("x.astype(np.float)  # here"), "has no attribute 'float'"),
    "unicode": (TEXT, y('np.array([["a"]] * len(x))').replace(ANSWER, f"{ANSWER}  # here"), "dtype is not supported"),
    "float64": (CONFIG, y("x.astype(np.float64)"), "Y is FP64 [1, 4], and config.pbtxt declares FP32 [rows, 4]"),
    "rows": (CONFIG, y("x[:1]"), "output Y has 1 rows for a request of"),
    "no_batch": (CONFIG, y("x[0]"), "output Y is FP32 [4]"),
    "misnamed": (CONFIG, y("x").replace('"Y"', '"Z"'), "the answer has no output Y"),
    "too_few": (CONFIG, body("pass"), "InferenceResponse(s) size is:0"),
    "one_for_all": (BATCHING, y("x").replace(ANSWER, f"{ANSWER}\n            break"), "requests at once"),
    "error_in_list": (CONFIG, body('responses.append(pb_utils.TritonError("no"))'), "found type"),
    "raises": (CONFIG, initialize('raise ValueError("no weights")  # here'), "ValueError: no weights"),
    "missing_key": (CONFIG, initialize('self.device = args["device"]  # here'), "KeyError: 'device'"),
    "relative": (CONFIG, initialize('self.labels = open("labels", encoding="utf-8")  # here'), "No such file"),
    "no_rows": (CONFIG.replace(INPUT, ""), y("x"), "request has 0 inputs"),
    "absent": (CONFIG, f"import no_such_module  # here\n{y('x')}", "No module named 'no_such_module'"),
    "policy": (f"{CONFIG}version_policy {{ latest {{ num_versions: 0 }} }}\n", y("x"), "at least one version"),
    "dies": (CONFIG, body("os._exit(3)"), "its process died"),
    "hangs": (CONFIG, body("time.sleep(1e6)"), "did not end its answer within"),
    "hangs_at_once": (CONFIG, initialize("time.sleep(1e6)"), "has not loaded it after"),
    "passive": (CONFIG.replace("KIND_CPU", "KIND_CPU passive: true"), y("x"), "crashed Triton"),
    "list_sent": (DECOUPLED, stream(f"sender.send([response], {LAST})  # here"), "incompatible function arguments"),
    "no_final": (DECOUPLED, stream("sender.send(response)"), "did not end its answer within"),
    "wrong_sender": (DECOUPLED, stream(f"request.send(response, {LAST})  # here"), "has no attribute 'send'"),
    "in_thread": (DECOUPLED, stream("threading.Thread(target=lambda: sender.end()).start()  # here"), "'end'"),
    "labels": (CONFIG, y("x + [0.0, 0.0, 0.0][x.argmax(axis=1).max()]  # here"), "list index out of range"),
    "columns": (
        f"{CONFIG}dynamic_batching {{ max_queue_delay_microseconds: 300000 }}\n",
        y("x / x.sum(axis=1).clip(1)  # here"),
        "operands could not be broadcast",
    ),
    "two_answers": (
        CONFIG,
        stream(f"sender.send(response)\nsender.send(response, {LAST})"),
        "expected a single response",
    ),
    "stream_dtype": (DECOUPLED, stream(f"sender.send(response, {LAST})").replace('"Y", x', '"Y", x > 0'), "is BOOL"),
    "control": (SEQUENCE, body(f"{START.replace('START', 'Start')}  # here\ny = x\n{ANSWER}"), "as_numpy"),
    "state": (SEQUENCE, body(f"{START}\ny = x if start else self.state  # here\n{ANSWER}"), "'state'"),
    "bls_output": (CONFIG, body(f"{ASK}{ANSWER}".replace('["Y"]', '["Z"]')), "'NoneType' object"),
    "bls_input": (CONFIG, body(f"{ASK}{ANSWER}".replace('"X", x', '"x", x')), "'NoneType' object"),
    "bls_dtype": (CONFIG, body(f"x = x.astype(np.float64)\n{ASK}{ANSWER}"), "'NoneType' object"),
    "bls_rows": (CONFIG, body(f"x = np.repeat(x, 9, 0)\n{ASK}{ANSWER}"), "'NoneType' object"),
    "component_dtype": (CONFIG, component('return {"Y": x > 0}'), "Output Y has dtype bool"),
    "component_fails": (CONFIG, component('return {"Y": x[9]}  # here'), "IndexError"),
}
VALID: Mapping[str, tuple[str, str]] = {
    "plain": (CONFIG, y("x")),
    "refuses": (
        TEXT,
        body('error = pb_utils.TritonError("no image")\nresponses.append(pb_utils.InferenceResponse(error=error))'),
    ),
    "component_refuses": (CONFIG, component('raise InputError("X is zero.", "Send another.")')),
    "sized": (CONFIG.replace("[ 4 ]", "[ -1, -1 ]"), y("x[:, :200, :][np.arange(len(x)), ..., :] + x[:, 199:200, :1]")),
    "divides": (CONFIG.replace("FP32", "INT32"), y("np.array([[7 // int(v) for v in row] for row in x], np.int32)")),
    "reads_json": (TEXT, y("np.array([[json.dumps(json.loads(v[0])).encode()] for v in x], np.object_)")),
    "slow": (CONFIG, body(f"time.sleep(1)\ny = x\n{ANSWER}")),
    "stream": (DECOUPLED, stream(f"sender.send(response)\nsender.send({LAST})")),
    "stream_of_none": (DECOUPLED, stream(f"sender.send({LAST})")),
    "stream_rows": (DECOUPLED, stream(f"sender.send(response, {LAST})").replace('"Y", x', '"Y", x[:1]')),
    "sequences": (
        SEQUENCE,
        body(f"{START}\nself.n = 0 if start else self.n + 1\ny = x + np.float32(self.n)\n{ANSWER}"),
    ),
    "batched": (BATCHING, y("x")),
    "calls": (CONFIG, body(f"{ASK}{ANSWER}")),
    "calls_computed": (CONFIG, body(f"{ASK}{ANSWER}".replace('"plain"', '"pla" + "in"'))),
    "bf16": (CONFIG.replace("FP32", "BF16"), y("x")),
    "unbatched": (CONFIG.replace("max_batch_size: 8", "max_batch_size: 0"), y("x")),
    "no_inputs": (
        CONFIG.replace(INPUT, "").replace("max_batch_size: 8", "max_batch_size: 0"),
        y("np.ones(4, np.float32)").replace("x = pb_utils", "pb_utils").replace('"X").as_numpy()', '"X")'),
    ),
    "reshaped": (CONFIG.replace("dims: [ 4 ]", "dims: [ 1 ] reshape { shape: [ ] }"), y("x")),
    "text_per_row": (TEXT.replace("[ 1 ]", "[ -1 ]"), y("x[:, 0]")),
    "on_gpu": (CONFIG.replace("KIND_CPU", "KIND_GPU"), y("x")),
}


def write(folder: Path, *names: str) -> Path:
    """Write models, by default all, into a repository."""
    for name, (config, code, *_) in {**MISTAKES, **VALID}.items():
        if not names or name in names:
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
            (folder / name / "1" / "model.py").write_text(code, encoding="utf-8")
    return folder


def find_line(name: str) -> int:
    """Return the line of a model's mistake, counted from 1; 0 if it is not in one line."""
    lines = [line.endswith("# here") for line in MISTAKES[name][1].splitlines()]
    return lines.index(True) + 1 if any(lines) else 0
