"""IP addresses of clients."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address, ip_network


def read_address(text: str) -> str:
    """Return an IP address in its usual form, without a port; empty if the text is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text)
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)


@lru_cache(1024)
def find_client(address: str) -> str:
    """Return what stands for a client without a key: its IPv4 address, or the first 64 bits of its IPv6 address."""
    address = read_address(address) or address
    if ":" not in address:
        return address
    return str(ip_network((address.partition("%")[0], 64), strict=False).network_address)
