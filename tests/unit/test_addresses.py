"""Addresses of clients, as sockets and proxies write them."""

from __future__ import annotations

import pytest

from shoal.errors import InputError
from shoal.serving.gateway.addresses import find_client, read_address
from shoal.serving.gateway.callers.callers import Callers
from shoal.serving.gateway.options import Limits


@pytest.mark.parametrize(
    ("text", "address", "client"),
    [
        ("10.0.0.5", "10.0.0.5", "10.0.0.5"),
        (" 9.9.9.9:4711", "9.9.9.9", "9.9.9.9"),
        ("::ffff:10.0.0.5", "10.0.0.5", "10.0.0.5"),
        ("2001:DB8:0:1::7", "2001:db8:0:1::7", "2001:db8:0:1::"),
        ("[2001:db8:0:1:ffff::1]:80", "2001:db8:0:1:ffff::1", "2001:db8:0:1::"),
        ("fe80::1%eth0", "fe80::1%eth0", "fe80::"),
        ("", "", ""),
        ("x" * 5000, "", "x" * 5000),
        ("None", "", "None"),
    ],
)
def test_forms(text: str, address: str, client: str) -> None:
    assert (read_address(text), find_client(text)) == (address, client)


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("10.0.0.5", ["1.2.3.4"], "1.2.3.4"),
        ("::ffff:10.0.0.5", ["7.7.7.7, 1.2.3.4:99"], "1.2.3.4"),
        ("2001:db8::1", ["1.2.3.4, 10.0.0.5"], "1.2.3.4"),
        ("10.0.0.5", ["1.2.3.4, "], "10.0.0.5"),
        ("10.0.0.5", ["1.2.3.4, unknown"], "10.0.0.5"),
        ("10.0.0.6", ["1.2.3.4"], "10.0.0.6"),
    ],
)
def test_the_last_address_before_the_proxies_is_the_callers(peer: str, forwarded: list[str], address: str) -> None:
    """Proxies are known in each form of their addresses; what is no address ends the way back."""
    callers = Callers(Limits(trusted_proxies=("::ffff:10.0.0.5", "2001:DB8::1")).trusted_proxies)
    assert callers.find(peer, forwarded).address == address


def test_a_network_of_ipv6_is_one_client_and_each_address_owns_its_requests() -> None:
    one, other = (Callers(()).find(f"2001:db8::{number}") for number in (1, 2))
    assert one.id == other.id
    assert one.owner != other.owner


def test_a_proxy_has_no_port() -> None:
    with pytest.raises(InputError, match=r"'10\.0\.0\.5:80' is not an IP address"):
        Limits(trusted_proxies=("10.0.0.5:80",))
