"""The time of a client's requests."""

import math

import pytest

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.client import Client
from shoal.errors import ServerError


def test_a_request_whose_time_is_up_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC rounds deadlines up to milliseconds, within which a quick server answers."""
    sent: list[float] = []
    with Client("127.0.0.1:1", timeout=math.ulp(0)) as client:
        monkeypatch.setattr(client._transport, "send", lambda call, seconds: sent.append(seconds))
        with pytest.raises(ServerError, match="did not answer within"):
            client._send(Call(Method.CONFIG, "text"))
    assert not sent
