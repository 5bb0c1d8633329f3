"""Form of the keys that clients of a service have.

A key is ``shoal_<id>_<secret><checksum>``: a public id, 256 random bits, and a CRC-32 of what precedes it, which finds
typing errors. The bits are random, so that one SHA-256 protects them at rest.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import zlib

from shoal.errors import InputError

VARIABLE = "SHOAL_API_KEY"
_PREFIX = "shoal_"
_KEY = re.compile(rf"({_PREFIX}([0-9a-f]{{12}})_[0-9a-f]{{64}})([0-9a-f]{{8}})", re.ASCII)
_LIKE = re.compile(rf"({_PREFIX}[0-9a-f]{{12}}_)[0-9a-f]+", re.ASCII)


def make_key(public: str) -> str:
    """Return the text of a new key with the id ``public``, which has 12 hexadecimal digits."""
    text = f"{_PREFIX}{public}_{secrets.token_hex(32)}"
    return text + _checksum(text)


def read_id(text: str) -> str:
    """Return the public id in a key's text; empty if the text has not the form of a key, or a wrong checksum."""
    found = _KEY.fullmatch(text)
    return found[2] if found and found[3] == _checksum(found[1]) else ""


def hide_keys(text: str) -> str:
    """Return a text with the secrets of keys in it left out."""
    return _LIKE.sub(r"\1...", text) if _PREFIX in text else text


def hash_key(text: str) -> str:
    """Return the SHA-256 of a key's text, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def check_key(text: str, source: str = "api_key") -> str:
    """Return a key that a client shall send, without white space around it; it may be another server's.

    ``source`` is where it came from, for the error.

    Raises:
        InputError: it is not one line of ASCII characters, or is a key of shoal's with a typing error.
    """
    text = text.strip()
    if not re.fullmatch(r"[!-~]{1,4096}", text) or (text.startswith(_PREFIX) and not read_id(text)):
        raise InputError(f"The key in {source} is damaged or has a typing error.", "Copy it again, whole, on one line.")
    return text


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
