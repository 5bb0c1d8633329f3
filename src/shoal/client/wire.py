"""Serialisation for KServe's inference protocol v2, over gRPC and over HTTP.

Sans-I/O, so that Client and AsyncClient share it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np

from shoal.client.calls import Answer, Call, Description, Method, Parameter
from shoal.client.failures import CallError, Kind, http_failure, stream_failure
from shoal.client.generate import to_generate
from shoal.component.tensors import Array

HEADER_LENGTH = "Inference-Header-Content-Length"  # of the JSON before the tensors' bytes
# Request parameters reserved by Triton.
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"}
READY = "READY"  # the state of a model that is loaded, in the index
# Request parameter that asks for the end of a stream as a message, and the parameter of answers that says it.
WITH_FINAL, IS_FINAL = "triton_enable_empty_final_response", "triton_final_response"


# --- HTTP --------------------------------------------------------------------------------------------------------


class HttpRequest(NamedTuple):
    """An HTTP request, ready to send."""

    verb: str
    path: str
    headers: dict[str, str]
    body: bytes


class HttpReply(NamedTuple):
    """An HTTP response, with the length of its JSON part."""

    status: int
    header_length: str | None
    body: bytes


def to_http(call: Call) -> HttpRequest:
    """Serialise ``call`` as an HTTP request."""
    path = f"/v2/models/{quote(call.model, safe='')}"
    if call.method is Method.INDEX:
        return HttpRequest("POST", "/v2/repository/index", {}, b"")
    if call.method is Method.STREAM:
        return HttpRequest("POST", f"{path}/generate_stream", {"Content-Type": "application/json"}, to_generate(call))
    if call.method is not Method.INFER:
        ends = {Method.METADATA: "", Method.CONFIG: "/config", Method.READY: "/ready"}
        return HttpRequest("GET", path + ends[call.method], {}, b"")
    blobs = {name: _to_bytes(array) for name, array in call.arrays.items()}
    parts = _json_request(call, {name: len(blob) for name, blob in blobs.items()})
    header = json.dumps(parts).encode()
    headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
    return HttpRequest("POST", f"{path}/infer", headers, b"".join([header, *blobs.values()]))


def _json_request(call: Call, sizes: Mapping[str, int]) -> dict[str, Any]:
    binary = {"binary_data": True}
    return {
        "id": call.request_id,
        "parameters": {**call.parameters, "binary_data_output": True},
        "inputs": [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": _datatype(array),
                "parameters": {"binary_data_size": sizes[name]},
            }
            for name, array in call.arrays.items()
        ],
        **({"outputs": [{"name": name, "parameters": binary} for name in call.outputs]} if call.outputs else {}),
    }


def from_http(call: Call, reply: HttpReply) -> Any:
    """Parse ``reply``: INFER to an ``Answer``, READY to a bool, INDEX to names, others to a ``Description``.

    Raises:
        CallError: the server refused, or this is not an answer of Triton's.
    """
    if call.method is Method.READY and reply.status in (400, 404):  # not ready, in Triton's protocol
        return False
    if reply.status != 200:
        raise http_failure(reply.status, reply.body)
    if call.method is Method.READY:
        return True
    try:
        if call.method is Method.INFER:
            return _http_answer(call, reply)
        document = json.loads(reply.body)
        if call.method is Method.INDEX:
            return [entry["name"] for entry in document if entry.get("state") == READY]
        return (Description.from_config if call.method is Method.CONFIG else Description.from_metadata)(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CallError(Kind.NOT_TRITON, f"unreadable answer: {error}") from None


def _http_answer(call: Call, reply: HttpReply) -> Answer:
    length = int(reply.header_length) if reply.header_length else len(reply.body)
    head, tail = json.loads(reply.body[:length]), memoryview(reply.body)[length:]
    arrays, start = {}, 0
    for output in head["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        raw = None if size is None else tail[start : start + size]
        start += size or 0
        given = np.array(output["data"], np.object_) if raw is None else raw
        arrays[output["name"]] = _to_array(output["datatype"], output["shape"], given)
    return _answer(call, arrays, head.get("model_version", ""), head.get("parameters", {}))


# --- gRPC --------------------------------------------------------------------------------------------------------


class GrpcRequest(NamedTuple):
    """A gRPC request: a procedure of GRPCInferenceService, and its message."""

    procedure: str
    message: Any


def to_grpc(call: Call) -> GrpcRequest:
    """Serialise ``call`` as a gRPC request."""
    from tritonclient.grpc import service_pb2 as pb

    if call.method is Method.METADATA:
        return GrpcRequest("ModelMetadata", pb.ModelMetadataRequest(name=call.model))
    if call.method is Method.CONFIG:
        return GrpcRequest("ModelConfig", pb.ModelConfigRequest(name=call.model))
    if call.method is Method.READY:
        return GrpcRequest("ModelReady", pb.ModelReadyRequest(name=call.model))
    if call.method is Method.INDEX:
        return GrpcRequest("RepositoryIndex", pb.RepositoryIndexRequest())
    message = pb.ModelInferRequest(model_name=call.model, id=call.request_id)
    for name, array in call.arrays.items():
        message.inputs.add(name=name, datatype=_datatype(array), shape=list(array.shape))
        message.raw_input_contents.append(_to_bytes(array))
    for name in call.outputs:
        message.outputs.add(name=name)
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in call.parameters.items():
        setattr(message.parameters[name], kinds[type(value)], value)
    if call.method is Method.STREAM:
        message.parameters[WITH_FINAL].bool_param = True
        return GrpcRequest("ModelStreamInfer", message)
    return GrpcRequest("ModelInfer", message)


def from_grpc(call: Call, reply: Any) -> Any:
    """Parse the message ``reply``, with the same results as ``from_http``.

    Raises:
        CallError: it is not an answer of Triton's.
    """
    if call.method is Method.READY:
        return bool(reply.ready)
    if call.method is Method.INDEX:
        return [model.name for model in reply.models if model.state == READY]
    if call.method is Method.CONFIG:
        return Description.from_config(_to_json(reply.config))
    if call.method is Method.METADATA:
        return Description.from_metadata(_to_json(reply))
    return _grpc_answer(call, reply)


def from_grpc_stream(call: Call, reply: Any) -> tuple[Answer | None, bool]:
    """Parse one message of a stream: its answer, if it has one, and whether it is the last.

    Raises:
        CallError: it is an error, or not an answer of Triton's.
    """
    if reply.error_message:
        raise stream_failure(reply.error_message)
    is_last = reply.infer_response.parameters[IS_FINAL].bool_param
    is_empty = is_last and not reply.infer_response.outputs
    return None if is_empty else _grpc_answer(call, reply.infer_response), is_last


def _grpc_answer(call: Call, reply: Any) -> Answer:
    raws = list(reply.raw_output_contents)
    try:
        arrays = {
            output.name: _to_array(output.datatype, list(output.shape), memoryview(raw))
            for output, raw in zip(reply.outputs, raws, strict=True)
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CallError(Kind.NOT_TRITON, f"unreadable answer: {error}") from None
    choices = {name: (value, value.WhichOneof("parameter_choice")) for name, value in reply.parameters.items()}
    parameters = {name: getattr(value, choice) for name, (value, choice) in choices.items() if choice}
    return _answer(call, arrays, reply.model_version, parameters)


def _to_json(message: Any) -> dict[str, Any]:
    """Convert the message to the JSON form of Triton's HTTP port."""
    from google.protobuf import json_format

    return dict(json_format.MessageToDict(message, preserving_proto_field_name=True))


# --- both --------------------------------------------------------------------------------------------------------


def _answer(call: Call, arrays: Mapping[str, Array], version: str, parameters: Mapping[str, Parameter]) -> Answer:
    """Build an ``Answer`` with outputs in the requested order, else in the model's."""
    order = [*(call.outputs or call.known_outputs), *arrays]
    return Answer(
        {name: arrays[name] for name in dict.fromkeys(order) if name in arrays},
        model=call.model,
        version=version,
        request_id=call.request_id,
        parameters={name: value for name, value in parameters.items() if name not in RESERVED | {IS_FINAL}},
    )


def _datatype(array: Array) -> str:
    from tritonclient.utils import np_to_triton_dtype

    return str(np_to_triton_dtype(array.dtype))


def _to_bytes(array: Array) -> bytes:
    from tritonclient.utils import serialize_byte_tensor

    if not array.size:
        return b""
    return bytes(serialize_byte_tensor(array).item() if array.dtype == np.object_ else array.tobytes())


def _to_array(datatype: str, shape: list[int], given: Any) -> Array:
    """Decode an output from raw bytes, or from the values of a JSON answer; BYTES elements become ``bytes``."""
    from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

    if not isinstance(given, memoryview):
        texts = [text.encode() if isinstance(text, str) else text for text in given.ravel()]
        array = np.array(texts, triton_to_np_dtype(datatype))
    elif datatype == "BYTES":
        array = deserialize_bytes_tensor(bytes(given)) if given else np.empty(0, np.object_)
    else:
        array = np.frombuffer(given, triton_to_np_dtype(datatype))
    return array.reshape(shape)
