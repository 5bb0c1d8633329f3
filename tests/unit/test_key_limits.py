"""Limits of keys, wrong keys by address, what a request leaves in the audit file, and how clients obey."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from tritonclient.grpc import service_pb2

from shoal.clients.client.calls import Call, Method
from shoal.clients.client.failures import Kind, grpc_failure, http_failure
from shoal.clients.client.flow import Attempts, ClientOptions
from shoal.clients.keys import hide_keys, make_key, read_id
from shoal.errors import ArtifactError, InputError
from shoal.serving.gateway.callers.access_log import AccessEntry, Audit, begin_entry
from shoal.serving.gateway.callers.accounts import MOST_FAILURES, Account, Failures, Window
from shoal.serving.gateway.callers.callers import Caller
from shoal.serving.gateway.callers.key_file import KeyFile, KeyLimits
from shoal.serving.gateway.callers.key_ring import KeyRing
from shoal.serving.gateway.options import Limits
from shoal.serving.gateway.refusals import FailedError, RefusalReason, RefusedError
from shoal.serving.gateway.v2.grpc_stream import GrpcStream
from shoal.serving.gateway.v2.rules import read_rules
from tests.support.gates import CONFIGS, MINE, make_gate
from tests.support.keys import World, bearer, edit
from tests.support.virtual_time import run, settle


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def ask(account: Account) -> bool:
    """Whether a request is let in."""
    try:
        account.check()
    except RefusedError:
        return False
    with account.use():
        return True


# --- limits ----------------------------------------------------------------------------------------------------------


def test_sixty_in_any_minute(clock: Clock) -> None:
    """Ask at random moments for an hour: no minute has more than 60 answers, and no refused one was for nothing."""
    account, chance, answered = Account("team", KeyLimits(60), clock), random.Random(0), list[float]()
    for _ in range(20_000):
        clock.now += chance.choice((0.0, 0.01, 0.2, 0.2, 0.2, 5.0 if chance.random() < 0.01 else 0.3))
        recent = [moment for moment in answered[-61:] if clock.now - moment < 60]
        if ask(account):
            assert len(recent) < 60
            answered.append(clock.now)
        else:
            assert len(recent) > 55, "uses within a tenth of a second count as one"
    assert len(answered) > 2000


def test_the_seconds_until_there_is_room(clock: Clock) -> None:
    account = Account("team", KeyLimits(3), clock)
    for _ in range(3):
        assert ask(account)
        clock.now += 10
    with pytest.raises(RefusedError) as caught:
        account.check()
    refused = caught.value
    assert refused.client_message == (
        "Too many requests for the key team: its limit is 3 requests a minute. Try again in 30 s."
    )
    assert dict(refused.headers) == {"retry-after": "30", "retry-after-ms": "30000"}
    assert dict(account.headers()) == {
        "x-ratelimit-limit-requests": "3", "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "50.000s",
    }  # fmt: skip
    clock.now += 29.9
    assert not ask(account)
    clock.now += 0.2
    assert ask(account)


def test_tokens_of_the_minute_decide_before_a_request(clock: Clock) -> None:
    account = Account("team", KeyLimits(tokens_per_minute=100), clock)
    account.count_tokens("input", 30)
    assert ask(account)
    account.count_tokens("output", 90)  # a request that has begun is answered to its end
    assert dict(account.headers())["x-ratelimit-remaining-tokens"] == "0"
    assert not ask(account)
    clock.now += 60
    assert ask(account)
    assert account.tokens == {"input": 30, "output": 90}


def test_requests_at_once() -> None:
    account = Account("team", KeyLimits(at_once=2))
    with account.use():
        account.check()
        with account.use():
            assert dict(account.headers()) == {"x-ratelimit-limit-at-once": "2", "x-ratelimit-remaining-at-once": "0"}
            with pytest.raises(RefusedError, match="its limit is 2 requests at once"):
                account.check()
        account.check()


def test_parts_of_a_request_count_as_one() -> None:
    gate, account = make_gate(), Account("team", KeyLimits(1, at_once=1))
    caller = Caller("x", account=account)
    with gate.traffic.count_once(caller) as sender, ExitStack() as parts:
        assert sender == caller
        for _ in range(3):
            parts.enter_context(gate.traffic.admit("plain", 1, sender))
        assert account._at_once == 1
        parts.close()
        assert account._at_once == 1, "until the request has ended"
        with gate.traffic.admit("plain", 1, sender):
            pass
    assert (account._at_once, account._requests.used) == (0, 1)
    with gate.traffic.count_once(caller) as sender, pytest.raises(RefusedError, match="1 requests a minute"):
        gate.traffic.admit("plain", 1, sender).__enter__()
    assert gate.traffic.in_flight("plain") == 0


def test_a_request_of_which_no_part_is_admitted_is_not_counted() -> None:
    gate, account = make_gate(), Account("team", KeyLimits(1))
    with gate.traffic.count_once(Caller("x", account=account)) as sender:
        assert sender.together is not None
        assert sender.together._account is account
    assert account._requests.used == 0
    with gate.traffic.count_once(MINE) as sender:
        assert sender is MINE


def test_a_window_keeps_few_entries(clock: Clock) -> None:
    window = Window(clock)
    for _ in range(100_000):
        window.add()
        clock.now += 0.001
    assert window.used == pytest.approx(60_000, abs=100)
    assert len(window._uses) <= 601
    assert window.rest == pytest.approx(60, abs=0.2)


def test_the_gate_counts_inference_alone_and_gives_back(clock: Clock) -> None:
    async def work() -> None:
        gate, account = make_gate(), Account("team", KeyLimits(2, at_once=1), clock)
        caller = Caller("x", account=account)

        async def call(_: Any, __: str) -> str:
            assert account._at_once == 1
            with pytest.raises(RefusedError, match="its limit is"):
                gate.traffic.admit("plain", 1, caller).__enter__()
            raise FailedError(400, "wrong")

        for _ in range(2):
            with pytest.raises(FailedError):
                await gate.ask(caller, "plain", b"x", call)
        with pytest.raises(RefusedError, match="2 requests a minute") as caught:
            await gate.ask(caller, "plain", b"x", call)
        assert caught.value.reason is RefusalReason.LIMIT
        assert account._at_once == 0
        with gate.traffic.admit("", 1, caller):  # a question about the server
            pass
        assert gate.traffic.outcomes["plain", "refused"] == 3
        assert gate.traffic.in_flight("plain") == 0

    run(work())


def test_limits_of_a_key_follow_the_file_and_keep_what_was_used(tmp_path: Path, clock: Clock) -> None:
    file = KeyFile(tmp_path / "keys.json")
    key = file.new("team", limits={"requests_per_minute": 2, "at_once": None})
    assert file.read()[0].limits == KeyLimits(2)
    ring = KeyRing(file.path, CONFIGS, monotonic=clock)
    caller = ring.find("1.2.3.4", [bearer(key)])
    assert caller.account is not None
    assert [ask(caller.account) for _ in range(3)] == [True, True, False]
    edit(file.path, lambda d: d["keys"][0].update(limits={"requests_per_minute": 3}))
    file.rotate("team", timedelta(hours=1))
    run(ring.look())
    again = ring.find("1.2.3.4", [bearer(key)])
    assert again == caller
    assert again.account is caller.account
    assert [ask(caller.account) for _ in range(2)] == [True, False]
    edit(file.path, lambda d: d["keys"][0].pop("limits"))  # as in a file of an earlier version
    assert file.read()[0].limits == KeyLimits()


@pytest.mark.parametrize("limit", [{"at_once": 0}, {"at_once": True}, {"at_once": "3"}, {"per_hour": 3}])
def test_a_file_with_a_wrong_limit_is_damaged(limit: dict[str, Any], world: World) -> None:
    edit(world.file.path, lambda d: d["keys"][0].update(limits=limit))
    with pytest.raises(ArtifactError, match="has a limit that is not a whole number of requests_per_minute, tokens_"):
        world.ring()


@pytest.mark.parametrize("number", [0, -1, 10**10])
def test_a_limit_out_of_range_is_refused(number: int, world: World) -> None:
    with pytest.raises(InputError, match=rf"--tokens-per-minute {number} is out of range\. Give 1 to 1000000000, or"):
        world.file.new("more", limits={"tokens_per_minute": number})


# --- wrong keys ------------------------------------------------------------------------------------------------------


def test_wrong_keys_of_an_address(world: World, clock: Clock) -> None:
    ring = KeyRing(world.file.path, CONFIGS, lambda: world.now.timestamp(), clock)
    wrong = [bearer(make_key("0" * 12))]
    for _ in range(MOST_FAILURES):
        assert ring.find("1.2.3.4", wrong).retry_after == 0
        clock.now += 1
    assert ring.find("1.2.3.4", wrong).retry_after == 40
    assert ring.find("1.2.3.4", []).retry_after == 0, "no key is not a wrong key"
    assert ring.find("1.2.3.5", wrong).retry_after == 0, "another address"
    assert ring.find("1.2.3.4", [bearer(world.key)]).is_known, "a right key of the same address"
    clock.now += 40
    assert ring.find("1.2.3.4", wrong).retry_after == 0


def test_addresses_are_forgotten(clock: Clock) -> None:
    failures = Failures(clock)
    for number in range(10_000):
        failures.add(f"10.0.{number // 256}.{number % 256}")
    assert len(failures._of) == 4096


def test_why_a_key_is_not_valid(world: World) -> None:
    expired = world.file.new("old", span=timedelta(seconds=1))
    revoked, ring = world.file.new("gone"), world.ring()
    edit(world.file.path, lambda d: d["keys"].pop())
    run(ring.look())
    world.now += timedelta(seconds=2)
    found = {
        fault: ring.find("1.2.3.4", given)
        for fault, given in {
            "no key": [], "malformed key": ["Basic x"], "unknown key": [bearer(make_key(read_id(world.key)))],
            "expired key": [bearer(expired)], "revoked key": [bearer(revoked)],
        }.items()
    }  # fmt: skip
    assert {fault: caller.fault for fault, caller in found.items()} == {fault: fault for fault in found}
    assert [caller.name for caller in found.values()] == ["", "", "", "old", "gone"]
    assert ring.find("1.2.3.4", [bearer(make_key(read_id(revoked)))]).fault == "unknown key"
    assert [account.name for account in ring.accounts.values()] == ["team", "old"]


# --- audit -----------------------------------------------------------------------------------------------------------


def lines(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        (["req_7f-3.a:b/c+d=@"], True), (["x" * 128], True), ([], False), ([""], False), (["x" * 129], False),
        (["a b"], False), (["a\nb"], False), (["é"], False), (["a", "a"], False), ([make_key("0" * 12)], False),
    ],
)  # fmt: skip
def test_ids_of_requests(given: list[str], is_kept: bool) -> None:
    entry = AccessEntry(None, "1.2.3.4", given)
    assert dict(entry.headers()) == {"x-request-id": given[0] if is_kept else entry.id}
    assert is_kept == (entry.id in given)
    assert is_kept or len(entry.id) == 32


def test_a_line_of_the_audit(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit")
    entry = AccessEntry(audit, "10.0.0.1", ["7"], "Inference")
    entry.caller, entry.model, entry.received, entry.sent = Caller("id", "1.2.3.4", name="team"), "m" * 200, 10, 20
    entry.count_tokens("input", 3)
    entry.count_tokens("output", 4)
    entry.end(200, is_answered=True)
    other = AccessEntry(audit, "10.0.0.1", [], "Inference")
    other.caller, other.model = Caller("id", is_known=False, name="old", fault="expired key"), make_key("0" * 12)
    other.refuse(RefusedError(RefusalReason.KEY, "no"))
    other.end("UNAUTHENTICATED", is_answered=False)
    audit.close()
    first, second = lines(tmp_path / "audit")
    assert first.pop("time").endswith("Z")
    assert first.pop("milliseconds") >= 0
    assert first == {
        "request_id": "7", "key": "team", "address": "1.2.3.4", "route": "Inference", "model": "m" * 100, "status": 200,
        "bytes_received": 10, "bytes_sent": 20, "input_tokens": 3, "output_tokens": 4, "why": "",
    }  # fmt: skip
    assert (second["key"], second["why"], second["status"]) == ("old", "expired key", "UNAUTHENTICATED")
    assert second["model"] == f"shoal_{'0' * 12}_..."


def test_an_audit_file_is_rotated_and_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.serving.gateway.callers.access_log._FILE_BYTES", 400)
    path = tmp_path / "audit"
    audit = Audit(path)
    for number in range(20):
        audit.write({"number": number, "more": "x" * 30})
    audit.close()
    assert len(list(tmp_path.iterdir())) == 2, "the second write is too large for the first file"
    audit = Audit(path)
    audit.write({"number": 20})
    audit.close()
    path.rename(tmp_path / "renamed")
    audit = Audit(path)
    audit.write({"number": 21})
    audit.close()
    found = [entry["number"] for file in tmp_path.iterdir() for entry in lines(file)]
    assert sorted(found) == list(range(22))


def test_a_file_that_was_renamed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = Audit(path)
    audit.write({"number": 0})
    while not path.read_text():
        os.sched_yield()
    path.rename(tmp_path / "renamed")
    audit.write({"number": 1})
    audit.close()
    assert [list(lines(file)) for file in (tmp_path / "renamed", path)] == [[{"number": 0}], [{"number": 1}]]


def test_lines_wait_while_a_file_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has renamed it, and descriptors run out. A line with odd text is kept too."""
    path, failures = tmp_path / "audit", iter([True, False, False])
    audit = Audit(path)
    path.rename(tmp_path / "renamed")
    whole = audit._file._open

    def fail() -> Any:
        if next(failures):
            raise OSError(24, "Too many open files")
        return whole()

    monkeypatch.setattr(audit._file, "_open", fail)
    audit.write({"number": 0})
    audit.write({"address": "\udcff\u2028"})
    while not (path.exists() and path.read_text()):
        os.sched_yield()
    audit.close()
    assert [*lines(path)] == [{"number": 0}, {"address": "\udcff\u2028"}]
    assert not (tmp_path / "renamed").read_text()


def test_an_audit_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"The audit file .* cannot be written: Is a directory\. Name another\."):
        Audit(tmp_path)


def test_keys_are_left_out_of_texts() -> None:
    key = make_key("0123456789ab")
    assert hide_keys(f"/v2/{key}?{key} and shoal_in_flight") == (
        "/v2/shoal_0123456789ab_...?shoal_0123456789ab_... and shoal_in_flight"
    )
    assert hide_keys(key[:40]) == "shoal_0123456789ab_..."


# --- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_client_waits_for_as_long_as_it_was_told(protocol: str) -> None:
    words = RefusedError(
        RefusalReason.LIMIT, "Too many requests for the key team: its limit is 3 requests a minute.", 12.4
    ).client_message
    if protocol == "grpc":
        failure = grpc_failure("RESOURCE_EXHAUSTED", words)
    else:
        failure = http_failure(429, json.dumps({"error": words}).encode())
    assert (failure.kind, failure.after) == (Kind.BUSY, 13)
    settings = ClientOptions("a:1", protocol, 60.0, 1, 3, is_repeatable=False)
    pauses = [Attempts(Call(Method.INFER, "m"), settings).pause(failure) for _ in range(99)]
    assert all(pause is not None and 13 <= pause <= 13 * 1.2 for pause in pauses)
    assert Attempts(Call(Method.INFER, "m", timeout=10.0), settings).pause(failure) is None, "its time is up before"


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_message_that_waited_for_a_client_that_left(is_cancelled: bool, tmp_path: Path) -> None:
    """It waits in the service until there is memory for it; it then reaches no model, and has its line."""

    async def work() -> None:
        gate, leave, sent = make_gate(Limits(max_request_mib=100 / 2**20)), list[Any](), asyncio.Queue[bytes]()
        gate.audit = Audit(tmp_path / "audit")
        context = SimpleNamespace(
            invocation_metadata=lambda: (), add_done_callback=leave.append, read=sent.get, write=None
        )
        entry = begin_entry(gate.audit, "10.0.0.1", ["s"], "Streamed inference")
        entry.caller = MINE
        stream = GrpcStream(gate, read_rules(CONFIGS), MINE, context)
        message = service_pb2.ModelInferRequest(model_name="plain", id="x" * 60)
        running = asyncio.ensure_future(stream.run([message.SerializeToString()]))
        sent.put_nowait(message.SerializeToString())
        await settle()
        call = gate.active.upstream.fake.calls[0]  # type: ignore[union-attr]
        assert len(call.written) == 1
        leave[0](None)
        if is_cancelled:
            call.finish(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            with pytest.raises(RefusedError):
                await running
        else:
            call.say(next(iter(stream._relay.unanswered)), is_final=True)
            await settle()
            call.finish()
            await running
        await settle()
        assert len(call.written) == 1
        gate.audit.close()

    run(work())
    statuses = [json.loads(line)["status"] for line in (tmp_path / "audit").read_text().splitlines()]
    assert statuses == ["UNAVAILABLE" if is_cancelled else "OK", "CANCELLED"]
