"""Models with mistakes that only a server finds, and odd models without one, for ``shoal check --load``.

The line with the mistake ends with ``# here``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HEAD = """import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
"""
CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
TEXT = CONFIG.replace("TYPE_FP32 dims: [ 4 ]", "TYPE_STRING dims: [ 1 ]")
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
BATCHING = CONFIG + "dynamic_batching { }\n"
SEQUENCE = (
    CONFIG
    + 'sequence_batching { control_input [ { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } } ] }\n'
)
FINAL = "flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"


def _init(body: str) -> str:
    return f"""{HEAD}
class TritonPythonModel:
    def initialize(self, args):
        {body}

    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x(r, "X").as_numpy())]) for r in requests]
"""


def _each(body: str, before: str = "pass") -> str:
    """Code that answers each request with ``y`` of ``x``."""
    lines = "\n            ".join(body.splitlines())
    return f"""{HEAD}
class TritonPythonModel:
    def initialize(self, args):
        {before}

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            {lines}
        return responses
"""


ANSWER = 'responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))'


def _stream(body: str) -> str:
    lines = "\n            ".join(body.splitlines())
    return f"""{HEAD}
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            response = pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])
            {lines}
        return None
"""


def _call(body: str) -> str:
    return _each(f"ask = pb_utils.InferenceRequest\n{body}\n{ANSWER}")


Y = 'pb_utils.get_output_tensor_by_name(got, "Y").as_numpy()'
SEND = 'inputs=[pb_utils.Tensor("X", x)]'
# By name: the configuration, the code, and words of what is found.
MISTAKES: Mapping[str, tuple[str, str, str]] = {
    "attribute": (CONFIG, _each(f"y = x * self.scale  # here\n{ANSWER}"), "has no attribute 'scale'"),
    "as_numpy": (
        CONFIG,
        _each(f"y = x\n{ANSWER}").replace('"X").as_numpy()', '"X")').replace("y = x", "y = x * 2  # here"),
        "unsupported operand",
    ),
    "exchanged": (
        CONFIG,
        _each('y = x\nresponses.append(pb_utils.InferenceResponse([pb_utils.Tensor(y, "Y")]))  # here'),
        "incompatible constructor arguments",
    ),
    "keyword": (
        CONFIG,
        _each('responses.append(pb_utils.InferenceResponse(outputs=[pb_utils.Tensor("Y", x)]))  # here'),
        "incompatible constructor",
    ),
    "np_float": (CONFIG, _each(f"y = x.astype(np.float)  # here\n{ANSWER}"), "np.float"),
    "unicode": (TEXT, _each(f'y = np.array([["a"]] * len(x))\n{ANSWER}  # here'), ""),
    "float64": (
        CONFIG,
        _each(f"y = x.astype(np.float64)\n{ANSWER}"),
        "output Y is FP64 [1, 4], and config.pbtxt declares FP32 [rows, 4]",
    ),
    "shape": (CONFIG, _each(f"y = x[:, :3]\n{ANSWER}"), "output Y is FP32 [1, 3]"),
    "rows": (CONFIG, _each(f"y = x[:1]\n{ANSWER}"), "1 rows for a request of 8"),
    "no_batch": (CONFIG, _each(f"y = x[0]\n{ANSWER}"), "output Y is FP32 [4]"),
    "misnamed": (
        CONFIG,
        _each('responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Z", x)]))'),
        "no output Y",
    ),
    "too_few": (CONFIG, _each("pass"), ""),
    "one_for_all": (BATCHING, _each(f"y = x\n{ANSWER}\nbreak"), ""),
    "error_in_list": (CONFIG, _each('responses.append(pb_utils.TritonError("no"))'), ""),
    "none": (CONFIG, _each("responses = None"), ""),
    "raises": (CONFIG, _init('raise ValueError("no weights")  # here'), "ValueError: no weights"),
    "missing_key": (CONFIG, _init('self.device = args["device"]  # here'), "KeyError: 'device'"),
    "config_text": (CONFIG, _init('self.name = args["model_config"]["name"]  # here'), "string indices"),
    "relative": (CONFIG, _init('self.labels = open("labels.txt", encoding="utf-8")  # here'), "labels.txt"),
    "damaged": (CONFIG, _init('self.labels = json.loads("{")  # here'), "JSONDecodeError"),
    "import": (CONFIG, "import no_such_module  # here\n" + _init("pass"), "no_such_module"),
    "syntax": (CONFIG, _init("match = 1").replace("match = 1", "print 1  # here"), ""),
    "dies": (CONFIG, _each("os._exit(3)"), "its process died"),
    "dies_at_once": (CONFIG, _init("os._exit(3)"), ""),
    "hangs": (CONFIG, _each("time.sleep(1e6)"), "did not end its answer"),
    "hangs_at_once": (CONFIG, _init("time.sleep(1e6)"), "has not loaded it after"),
    "passive": (CONFIG.replace("KIND_CPU", "KIND_CPU passive: true"), _each(f"y = x\n{ANSWER}"), "crashed Triton"),
    "list_sent": (DECOUPLED, _stream(f"sender.send([response], {FINAL})  # here"), "incompatible function arguments"),
    "no_final": (DECOUPLED, _stream("sender.send(response)"), "did not end"),
    "wrong_sender": (DECOUPLED, _stream(f"request.send(response, {FINAL})  # here"), "has no attribute 'send'"),
    "flag": (DECOUPLED, _stream("sender.send(response, flags=pb_utils.FINAL)  # here"), "FINAL"),
    "thread": (
        DECOUPLED,
        _stream("threading.Thread(target=lambda: sender.send(response * 2)).start()  # here"),
        "unsupported operand",
    ),
    "stream_dtype": (
        DECOUPLED,
        _stream(f"sender.send(response, {FINAL})").replace('"Y", x', '"Y", x.astype(np.int32)'),
        "INT32",
    ),
    "sequence": (
        SEQUENCE,
        _each(f'start = pb_utils.get_input_tensor_by_name(request, "Start").as_numpy()  # here\ny = x\n{ANSWER}'),
        "as_numpy",
    ),
    "sequence_state": (
        SEQUENCE,
        _each(
            f'start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()\nif start[0, 0]:\n    self.x = {{}}\ny = x if start[0, 0] else self.x["a"]  # here\n{ANSWER}'
        ),
        "KeyError",
    ),
    "bls_output": (
        CONFIG,
        _call(f'got = ask(model_name="plain", requested_output_names=["Z"], {SEND}).exec()\ny = {Y}  # here'),
        "",
    ),
    "bls_input": (
        CONFIG,
        _call(
            f'got = ask(model_name="plain", requested_output_names=["Y"], inputs=[pb_utils.Tensor("x", x)]).exec()\ny = {Y}  # here'
        ),
        "",
    ),
    "bls_model": (
        CONFIG,
        _call(f'got = ask(model_name="plan", requested_output_names=["Y"], {SEND}).exec()\ny = {Y}  # here'),
        "",
    ),
    "bls_version": (
        CONFIG,
        _call(
            f'got = ask(model_name="plain", model_version="1", requested_output_names=["Y"], {SEND}).exec()  # here\ny = {Y}'
        ),
        "",
    ),
    "bls_float64": (
        CONFIG,
        _call(
            f'got = ask(model_name="plain", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x.astype(np.float64))]).exec()\ny = {Y}  # here'
        ),
        "",
    ),
    "bls_no_outputs": (CONFIG, _call(f'got = ask(model_name="plain", {SEND}).exec()  # here\ny = {Y}'), ""),
    "bls_no_batch": (
        CONFIG,
        _call(
            f'got = ask(model_name="plain", requested_output_names=["Y"], inputs=[pb_utils.Tensor("X", x[0])]).exec()\ny = {Y}  # here'
        ),
        "",
    ),
    "bls_rows": (
        CONFIG,
        _call(
            f'x = np.repeat(x, 9, 0)\ngot = ask(model_name="plain", requested_output_names=["Y"], {SEND}).exec()\ny = {Y}  # here'
        ),
        "",
    ),
    "cancelled": (DECOUPLED, _stream(f"sender.send(response, {FINAL})\nf = sender.is_cancelled\nf()"), ""),
}
VALID: Mapping[str, tuple[str, str]] = {
    "plain": (CONFIG, _each(f"y = x\n{ANSWER}")),
    "refuses": (
        TEXT,
        _each('responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("not an image")))'),
    ),
    "sized": (
        CONFIG.replace("dims: [ 4 ]", "dims: [ -1, -1 ]"),
        _each(f'if x.shape[1] < 200:\n    raise ValueError("too small")\ny = x\n{ANSWER}'),
    ),
    "json": (
        TEXT,
        _each(f"y = np.array([[json.dumps(json.loads(row[0])).encode()] for row in x], np.object_)\n{ANSWER}"),
    ),
    "slow": (CONFIG, _each(f"time.sleep(3)\ny = x\n{ANSWER}")),
    "slow_to_load": (CONFIG, _init("time.sleep(15)")),
    "stream": (DECOUPLED, _stream(f"sender.send(response)\nsender.send({FINAL})")),
    "stream_of_none": (DECOUPLED, _stream(f"sender.send({FINAL})")),
    "stream_threads": (
        DECOUPLED,
        _stream(f"threading.Thread(target=sender.send, args=(response,), kwargs=dict({FINAL})).start()"),
    ),
    "stream_rows": (DECOUPLED, _stream(f"sender.send(response)\nsender.send({FINAL})").replace('"Y", x', '"Y", x[:1]')),
    "sequences": (
        SEQUENCE,
        _each(
            f'start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy()\nif start[0, 0]:\n    self.x = 0\nself.x += 1\ny = x + np.float32(self.x)\n{ANSWER}'
        ),
    ),
    "batched": (BATCHING, _each(f"y = x\n{ANSWER}")),
    "calls": (CONFIG, _call(f'got = ask(model_name="plain", requested_output_names=["Y"], {SEND}).exec()\ny = {Y}')),
    "calls_other": (
        CONFIG,
        _call(f'got = ask(model_name="pla" + "in", requested_output_names=["Y"], {SEND}).exec()\ny = {Y}'),
    ),
    "half": (CONFIG.replace("TYPE_FP32", "TYPE_FP16"), _each(f"y = x\n{ANSWER}")),
    "bf16": (CONFIG.replace("TYPE_FP32", "TYPE_BF16"), _each(f"y = x\n{ANSWER}")),
    "unbatched": (CONFIG.replace("max_batch_size: 8", "max_batch_size: 0"), _each(f"y = x\n{ANSWER}")),
    "reshaped": (CONFIG.replace("dims: [ 4 ]", "dims: [ 1 ] reshape { shape: [ ] }"), _each(f"y = x\n{ANSWER}")),
    "optional": (
        CONFIG.replace("dims: [ 4 ] } ]\noutput", "dims: [ 4 ] optional: true } ]\noutput"),
        _each(f"y = x\n{ANSWER}")
        .replace('"X").as_numpy()', '"X")')
        .replace("y = x", "y = x.as_numpy() if x else np.zeros((1, 4), np.float32)"),
    ),
    "odd_name-1.2": (CONFIG, _each(f"y = x\n{ANSWER}")),
    "on_gpu": (CONFIG.replace("KIND_CPU", "KIND_GPU"), _each(f"y = x\n{ANSWER}")),
}


def write(folder: Path, names: list[str] | None = None) -> Path:
    """Write the models ``names``, by default all, into a repository."""
    for name, (config, code, *_) in {**MISTAKES, **VALID}.items():
        if names is None or name in names:
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "config.pbtxt").write_text(config, encoding="utf-8")
            (folder / name / "1" / "model.py").write_text(code, encoding="utf-8")
    return folder
