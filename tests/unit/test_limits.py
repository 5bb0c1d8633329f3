"""What clients may hold of a service, and who they are."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import pytest

from shoal.authoring.repository.model_folders import read_configs
from shoal.errors import ArtifactError, InputError
from shoal.serving.gateway.callers.callers import Caller, Callers
from shoal.serving.gateway.callers.quotas import Quota, Reservation
from shoal.serving.gateway.core.models import find_exposed
from shoal.serving.gateway.http.bodies import inflate
from shoal.serving.gateway.logs import Flood, Plain
from shoal.serving.gateway.options import Options
from shoal.serving.gateway.refusals import RefusalReason, RefusedError
from tests.support.service import make_repository


def test_a_caller_gets_its_share() -> None:
    quota, a, b, c = Quota(10, 0.5), Caller("a"), Caller("b"), Caller("c")
    quota.take(a, 5)
    assert not quota.has(a)
    assert quota.has(b, 5)
    assert not quota.has(b, 6)
    quota.take(b, 5)
    assert not quota.has(c)
    with Reservation(quota, c) as held:
        held.grow(3)  # an answer, which is held in any case
        assert quota.taken == 13
    quota.give_back(a, 5)
    assert quota.taken == 5
    assert quota.has(a, 5)


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.1", ["1.2.3.4"], "10.0.0.1"),  # nobody's proxy
        ("10.0.0.5", [], "10.0.0.5"),
        ("10.0.0.5", ["1.2.3.4"], "1.2.3.4"),
        ("10.0.0.5", ["6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # what came before, the client wrote itself
        ("10.0.0.5", ["6.6.6.6", "1.2.3.4, 10.0.0.6"], "1.2.3.4"),
    ],
)
def test_the_caller_behind_a_trusted_proxy(peer: str, forwarded: list[str], address: str) -> None:
    assert Callers(("10.0.0.5", "10.0.0.6")).find(peer, forwarded).id == address


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "example.org", "::"])
def test_off_loopback_is_said(host: str) -> None:
    with pytest.raises(InputError, match=r"without a key\. Give --keys FILE .* or --open"):
        Options(host=host)
    assert Options(host=host, is_open=True).host == host
    assert Options(host=host, keys=Path("keys.json")).takes_pages
    with pytest.raises(InputError, match="--open has no effect with --keys"):
        Options(host=host, keys=Path("keys.json"), is_open=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_is_for_who_is_on_the_machine(host: str) -> None:
    assert Options(host=host).host == host


def test_who_may_be_asked(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)  # whose models are public
    assert find_exposed(read_configs(repository), []) == {"chain", "first", "second", "other"}
    for name in ("first", "second", "other"):
        config = repository / name / "config.pbtxt"
        config.write_text(config.read_text().replace('"public"', '"private"'))
    assert find_exposed(read_configs(repository), []) == {"chain"}
    assert find_exposed(read_configs(repository), ["other", "gone"]) == {"chain", "other"}
    (repository / "chain" / "config.pbtxt").unlink()
    configs = {name: config for name, config in read_configs(repository).items() if name != "chain"}
    assert find_exposed(configs, []) == {"first", "second", "other"}
    config.write_text(config.read_text().replace('"private"', '"public"').replace('"true"', '"yes"'))
    configs["other"] = read_configs(repository)["other"]
    with pytest.raises(ArtifactError, match="Parameter public of model other is 'yes'; expected false or true"):
        find_exposed(configs, [])


@pytest.mark.parametrize("window", [zlib.MAX_WBITS, -zlib.MAX_WBITS, zlib.MAX_WBITS + 16])
def test_bodies_are_inflated(window: int) -> None:
    encoding = "gzip" if window > zlib.MAX_WBITS else "deflate"
    content = bytes(range(256)) * 20_000
    packer = zlib.compressobj(wbits=window)
    body = packer.compress(content) + packer.flush()
    assert inflate(body, encoding, len(content)) == content
    for bad, reason in (
        (body[:-5], RefusalReason.WRONG),
        (body + b"x", RefusalReason.WRONG),
        (b"x" + body, RefusalReason.WRONG),
        (b"", RefusalReason.WRONG),
    ):
        with pytest.raises(RefusedError) as caught:
            inflate(bad, encoding, len(content))
        assert caught.value.reason is reason
    with pytest.raises(RefusedError) as caught:
        inflate(body, encoding, len(content) - 1)
    assert caught.value.reason is RefusalReason.LARGE


def record(message: str, *arguments: object, created: float = 0.0, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("shoal", logging.WARNING, __file__, 1, message, arguments, None)
    made.created = created
    vars(made).update(more)
    return made


def test_what_clients_cause_is_told_once_in_a_while() -> None:
    flood = Flood()
    told = [made for number in range(300) if flood.filter(made := record("x %d", number, created=number / 10, most=1))]
    assert [made.getMessage() for made in told] == ["x 0", "x 100 (99 more like it)", "x 200 (99 more like it)"]


def test_names_forge_no_lines() -> None:
    said = Plain().format(record("no model %s", "x\n14:00:00 error: \x1b[31mgone"))
    assert said.endswith("warning: no model x\\x0a14:00:00 error: \\x1b[31mgone")
