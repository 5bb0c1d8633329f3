"""The fake is as strict as the real module where it matters."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from tests.support import fake_triton
from tests.support.fake_triton import InferenceRequest, InferenceResponse, Tensor, TritonError, TritonModelException


def test_gpu_tensors_have_no_numpy_form() -> None:
    tensor = Tensor("X", np.ones(3), is_on_gpu=True)
    assert not tensor.is_cpu()
    assert tensor.__dlpack_device__()[0] == 2
    with pytest.raises(TritonModelException, match="stored in GPU"):
        tensor.as_numpy()


def test_capsules_can_be_taken_once() -> None:
    capsule = Tensor("X", np.arange(3)).to_dlpack()
    assert Tensor.from_dlpack("X", capsule).as_numpy().tolist() == [0, 1, 2]
    with pytest.raises(Exception, match="incorrect name"):
        Tensor.from_dlpack("X", capsule)


def test_only_contiguous_arrays_cross() -> None:
    assert Tensor.from_dlpack("X", torch.arange(6).reshape(2, 3)).as_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(TritonModelException, match="not contiguous"):
        Tensor.from_dlpack("X", torch.arange(6).reshape(2, 3).T)


def test_numpy_arrays_and_strings_do_not_cross_by_dlpack() -> None:
    with pytest.raises(TritonModelException, match="segmentation fault"):
        Tensor.from_dlpack("X", np.ones(3))
    with pytest.raises(TritonModelException, match="string tensors"):
        Tensor("X", np.array([b"a"], np.object_)).to_dlpack()


def test_strings_are_serialised_as_triton_does() -> None:
    strings = np.array([b"a\0b", b"", "é".encode()], np.object_)
    blob = fake_triton.serialize_byte_tensor(strings)
    assert blob == b"\x03\0\0\0a\0b" + b"\0\0\0\0" + b"\x02\0\0\0\xc3\xa9"
    assert fake_triton.deserialize_bytes_tensor(np.frombuffer(blob, np.uint8)).tolist() == strings.tolist()


def test_requests_and_responses() -> None:
    request = InferenceRequest([Tensor("X", np.ones(1))], request_id="7", has_gone=True)
    assert (request.request_id(), request.is_cancelled()) == ("7", True)
    assert fake_triton.get_input_tensor_by_name(request, "Y") is None
    with pytest.raises(TritonModelException, match="no luck"):
        InferenceResponse(error=TritonError("no luck")).arrays()


def test_installing_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "triton_python_backend_utils"
    with fake_triton.installed():
        assert sys.modules[name] is fake_triton
    assert name not in sys.modules
    monkeypatch.setitem(sys.modules, name, pytest)
    with fake_triton.installed():
        pass
    assert sys.modules[name] is pytest
