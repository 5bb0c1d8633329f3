"""TLS of clients: which servers they trust, and the certificate that they show."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypedDict, TypeVar

from shoal.errors import InputError

T = TypeVar("T")


class Access(TypedDict, total=False):
    """Options of a client that are about access to its server."""

    api_key: str
    ca_cert: str
    client_cert: str


class Tls(NamedTuple):
    """Trust for HTTP, as a context, and for gRPC, as the files in PEM that its credentials are made of."""

    context: ssl.SSLContext
    authorities: bytes | None
    own: bytes | None

    @classmethod
    def read(cls, ca_cert: str, client_cert: str) -> Tls:
        """Read the authorities that certify servers, and the client's own certificate with its key.

        Without ``ca_cert``, HTTP trusts the authorities of the machine, and gRPC those that its library brings; the
        variable ``SSL_CERT_FILE`` replaces either.

        Raises:
            InputError: a file cannot be read, or has something else.
        """
        from shoal.system.files import read_bytes  # which a client without TLS does not need

        ca_cert = ca_cert or os.environ.get("SSL_CERT_FILE", "")
        ca, own = (_read(path, partial(read_bytes, path)) if path else None for path in (ca_cert, client_cert))
        context = _read(ca_cert, lambda: ssl.create_default_context(cafile=ca_cert or None))
        if client_cert:
            _read(client_cert, lambda: context.load_cert_chain(client_cert, password=refuse_password))
        return cls(context, ca, own)

    def credentials(self) -> Any:
        """Return the credentials of a gRPC channel."""
        import grpc  # type: ignore[import-untyped]

        return grpc.ssl_channel_credentials(self.authorities, self.own, self.own)


def _read(path: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, ValueError) as error:  # ssl's are of the first kind
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} cannot be used for TLS: {reason}.",
            "Give PEM files: ca_cert has certificates, client_cert one with its key, without a password.",
        ) from None


def refuse_password() -> str:
    """Raise ``ValueError``, as the password of a private key: OpenSSL would ask for it at the terminal."""
    raise ValueError("the key has a password")
