"""The active server: what is refused while models are unavailable, and who waits for the next server."""

from __future__ import annotations

import asyncio

import pytest

from shoal.serving.gateway.callers.callers import ANYONE
from shoal.serving.gateway.core.active_server import MOST_RETRY_SECONDS, NEXT_SECONDS, ActiveServer
from shoal.serving.gateway.refusals import RETRY_SECONDS, RefusalReason, RefusedError
from tests.support.fake_upstream import FakeStream, FakeUpstream
from tests.support.virtual_time import run, settle


async def opened() -> tuple[ActiveServer, FakeUpstream]:
    active, upstream = ActiveServer(), FakeUpstream()
    await active.activate(upstream)
    return active, upstream


def test_all_requests_are_refused_until_a_server_is_active() -> None:
    async def work() -> None:
        active = ActiveServer()
        active.block(["a"], "it died")  # without a server
        assert active.trouble() == active.trouble("b") == "it is starting"
        assert not active.is_open("b")
        with pytest.raises(RefusedError, match=r"^b is unavailable: it is starting\.$") as caught:
            active.find("b")
        assert (caught.value.reason, caught.value.retry_after) == (RefusalReason.UNAVAILABLE, RETRY_SECONDS)
        upstream = FakeUpstream()
        await active.activate(upstream)
        assert active.trouble() == active.trouble("a") == ""
        assert active.find("a") is active.find("") is upstream
        await active.close("it is stopping")
        with pytest.raises(RefusedError, match=r"^The server is unavailable: it is stopping\.$"):
            active.find("")
        assert not active.is_open("a")

    run(work())


def test_no_server_although_open() -> None:
    async def work() -> None:
        active = ActiveServer()
        active.closed = ""
        assert not active.is_open("a")
        with pytest.raises(RefusedError):
            active.find("a")

    run(work())


def test_a_blocked_model_loses_its_requests_and_streams_and_no_others() -> None:
    async def work() -> None:
        active, upstream = await opened()
        tasks = {name: asyncio.create_task(asyncio.sleep(9)) for name in "ab"}
        upstream.sent = {task: name for name, task in tasks.items()}
        streams = {name: FakeStream(ANYONE, [name]) for name in "ab"}
        upstream.streams = {*streams.values()}
        active.block(["a", "c"], "it died")
        await settle()
        assert tasks["a"].cancelled()
        assert not tasks["b"].done()
        assert (streams["a"].ends, streams["b"].ends) == (["ended"], [])
        assert (active.trouble("a"), active.trouble("b"), active.trouble()) == ("it died", "", "it died")
        assert active.is_open("b")
        assert not active.is_open("c")
        active.block(["b"], "it hangs")
        assert active.trouble("a") == "it died"
        await active.activate(FakeUpstream())
        assert active.trouble() == ""

    run(work())


def test_a_refusal_names_a_time_that_grows_with_the_outage() -> None:
    async def work() -> None:
        active, _ = await opened()

        def find_seconds(model: str) -> float:
            with pytest.raises(RefusedError) as caught:
                active.find(model)
            return caught.value.retry_after

        active.block(["a"], "it died")
        for elapsed, seconds in ((0, RETRY_SECONDS), (20, 20), (100, MOST_RETRY_SECONDS)):
            await asyncio.sleep(elapsed)
            active.refuse(["a", "b"], "its server is started again")
            assert find_seconds("a") == pytest.approx(seconds)
            await active.activate(FakeUpstream())
            active.block(["a"], "it died")
        assert find_seconds("a") == RETRY_SECONDS, "it was available meanwhile"
        active.next_start = asyncio.get_running_loop().time() + 30
        assert find_seconds("a") == pytest.approx(30 + RETRY_SECONDS)

    run(work())


def test_lost_requests_are_explained() -> None:
    async def work() -> None:
        active, _ = await opened()
        assert active.lost("a").message == "The process of a ended while it had this request."
        await active.close("it is stopping")
        refused = active.lost("a")
        assert refused.message == "The server is stopping, and ended this request to a."
        assert (refused.reason, refused.retry_after) == (RefusalReason.UNAVAILABLE, RETRY_SECONDS)

    run(work())


@pytest.mark.parametrize("event", ["next", "healthy", "close", "nothing", "blocked", "next but blocked"])
def test_waiting_for_the_next_server(event: str) -> None:
    async def work() -> None:
        active, old = await opened()
        await active.confirm_healthy()  # earlier than the loss: it proves nothing
        after, clock = FakeUpstream(), asyncio.get_running_loop().time
        start, waiting = clock(), asyncio.create_task(active.wait_for_next("a", old))
        await asyncio.sleep(2)
        assert not waiting.done()
        if event.startswith("next"):
            active.upstream = after
            active.blocked = {"a": "it died"} if "blocked" in event else {}
            await active._notify()
        elif event == "blocked":
            active.block(["a"], "it died")
            await active.confirm_healthy()
        elif event == "healthy":
            await active.confirm_healthy()
        elif event == "close":
            await active.close("it is stopping")
        found, seconds = await waiting, clock() - start
        expected = {"next": after, "healthy": old, "nothing": old}
        assert found is expected.get(event)
        assert seconds == pytest.approx(2 if event in ("next", "healthy", "close") else NEXT_SECONDS)

    run(work())


def test_a_healthy_server_starts_counting_its_losses_over() -> None:
    async def work() -> None:
        active = ActiveServer()
        await active.confirm_healthy()  # without a server
        active, upstream = await opened()
        upstream.num_lost = 3
        active.block(["a"], "it died")
        await active.confirm_healthy()
        assert upstream.num_lost == 3
        active.blocked = {}
        await active.confirm_healthy()
        assert upstream.num_lost == 0

    run(work())


def test_the_time_of_the_last_answer() -> None:
    async def work() -> float:
        active, _ = await opened()
        start = active.answered
        await asyncio.sleep(3)
        active.note_answer()
        return active.answered - start

    assert run(work()) == pytest.approx(3)
