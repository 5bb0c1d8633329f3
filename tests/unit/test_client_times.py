"""The time of a client's requests, and the models that it lists."""

import json
import math

import pytest
from tritonclient.grpc import service_pb2

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.client import Client
from shoal.clients.client.grpc_transport import from_grpc
from shoal.clients.client.http_transport import HttpReply, from_http
from shoal.errors import ServerError


def test_a_request_whose_time_is_up_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC rounds deadlines up to milliseconds, within which a quick server answers."""
    sent: list[float] = []
    with Client("127.0.0.1:1", timeout=math.ulp(0)) as client:
        monkeypatch.setattr(client._transport, "send", lambda call, seconds: sent.append(seconds))
        with pytest.raises(ServerError, match="did not answer within"):
            client._send(Call(Method.CONFIG, "text"))
    assert not sent


def test_the_models_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"name": "a", "version": "1", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE", "reason": "x"}]
    index = service_pb2.RepositoryIndexResponse(models=entries)
    call = Call(Method.INDEX, "")
    assert from_grpc(call, index) == from_http(call, HttpReply(200, None, json.dumps(entries).encode()))
    with Client("127.0.0.1:1") as client:
        monkeypatch.setattr(client._transport, "send", lambda call, seconds: from_grpc(call, index))
        assert [(each.name, each.is_ready, each.reason) for each in client.models()] == [
            ("a", True, ""),
            ("b", False, "x"),
        ]
