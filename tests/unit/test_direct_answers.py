"""Answers between streaming components go over a socket of the asking process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from shoal.errors import InputError, ServerError, ShoalError
from shoal.kit.component.answer_socket import ANSWERS, Answers, Connection, Listener, connect
from shoal.kit.component.tensors import Device

HOST = Device()
ARRAYS = {
    "numbers": np.arange(6, dtype=np.int32).reshape(2, 3),
    "flags": np.array([[True], [False]]),
    "none": np.zeros((0, 4), np.float32),
    "scalar": np.array(2.5),
    "texts": np.array([["é".encode(), "wörter"], [b"\xff\0", b""]], np.object_),
}


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Answers]]:
    with closing(Listener()) as listener:
        connection = connect({ANSWERS: listener.address})
        answers = listener.accept()
    assert connection is not None
    assert answers is not None
    with closing(connection), closing(answers):
        yield connection, answers


def test_arrays_arrive_as_they_were(pair: tuple[Connection, Answers]) -> None:
    connection, answers = pair
    assert connection.send(ARRAYS, HOST)
    assert connection.send(None, HOST)
    (answer,) = answers.read("m", HOST)
    assert list(answer) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert answer[name].dtype == array.dtype
        assert answer[name].shape == array.shape
    assert answer["texts"].tolist() == [["é".encode(), "wörter".encode()], [b"\xff\0", b""]]
    for name in ("numbers", "flags", "none", "scalar"):
        assert np.array_equal(answer[name], ARRAYS[name])


@pytest.mark.parametrize("error", [InputError("It is 3.", "Give 2."), ServerError("Busy."), ShoalError("Failed.")])
def test_errors_keep_their_class(pair: tuple[Connection, Answers], error: ShoalError) -> None:
    connection, answers = pair
    connection.send({"numbers": np.zeros(1)}, HOST)
    connection.send(error, HOST)
    read = answers.read("m", HOST)
    next(read)
    with pytest.raises(type(error)) as caught:
        next(read)
    assert type(caught.value) is type(error)
    assert (caught.value.what, caught.value.fix) == (error.what, error.fix)


def test_a_model_that_is_ended_has_failed(pair: tuple[Connection, Answers]) -> None:
    connection, answers = pair
    connection.send({"numbers": np.zeros(1)}, HOST)
    connection.close()
    read = answers.read("m", HOST)
    next(read)
    with pytest.raises(ServerError, match="Model m was ended before its last answer"):
        next(read)


def test_unread_answers_wait_without_blocking(pair: tuple[Connection, Answers]) -> None:
    connection, answers = pair
    large = {"numbers": np.arange(100_000)}
    start = time.monotonic()
    taken = [connection.send(large, HOST) for _ in range(20)]
    assert not all(taken)
    connection.send(None, HOST)
    assert time.monotonic() - start < 5
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(int(a["numbers"].sum()) for a in answers.read("m", HOST)))
    reader.start()
    while not connection.flush():
        time.sleep(0.001)
    reader.join()
    assert found == [int(large["numbers"].sum())] * 20


def test_a_reader_that_leaves_is_noticed(pair: tuple[Connection, Answers]) -> None:
    connection, answers = pair
    assert not connection.has_left()
    answers.close()
    assert connection.has_left()
    assert connection.send(ARRAYS, HOST)  # it is dropped without an error


@pytest.mark.parametrize("address", ["", "other", "shoal-answers-0", 5])
def test_an_address_that_is_not_a_components(address: object) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0other")
        other.listen()
        with pytest.raises(InputError, match="The parameter shoal_answers is not the address of a component"):
            connect({ANSWERS: address})


def test_a_model_that_does_not_connect() -> None:
    with closing(Listener()) as listener:
        assert listener.accept() is None
    assert connect({}) is None
