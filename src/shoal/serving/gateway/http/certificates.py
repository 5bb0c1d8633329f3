"""TLS of a service's ports: its certificate, which follows its files."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc  # type: ignore[import-untyped]

from shoal.clients.client.tls import refuse_password
from shoal.errors import InputError
from shoal.serving.gateway.callers.file_watcher import WatchedFiles
from shoal.serving.gateway.options import Options
from shoal.system.files import read_bytes

_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; each has forward secrecy, and authenticates what it encrypts
_MOST_BYTES = 2**20
# the kinds of key that gRPC's clients (BoringSSL) take, as a certificate says them in DER: RSA, P-256 and P-384
_RSA, _EC = "300d06092a864886f70d0101010500", "06072a8648ce3d0201"
_KINDS = [bytes.fromhex(kind) for kind in (_RSA, f"3013{_EC}06082a8648ce3d030107", f"3010{_EC}06052b81040022")]
_WRONG_KIND = "gRPC's clients take RSA keys, and those on the curves P-256 and P-384"
_REASONS = {
    "KEY_VALUES_MISMATCH": "the key is another certificate's",
    "EE_KEY_TOO_SMALL": "the key has too few bits",
    "NO_SHARED_CIPHER": _WRONG_KIND,
}
_FLIGHTS = 4  # at most, in each direction of a handshake


class _Read(NamedTuple):
    context: ssl.SSLContext
    configuration: Any  # grpc's


class Certificates(WatchedFiles):
    """Certificate of a service, for connections over HTTP (``context``) and gRPC (``credentials``).

    A change of the files takes effect for the connections that begin after it.

    Raises:
        InputError: a file cannot be read, the key is another certificate's, or the certificate is not valid now.
    """

    stays = "The certificate stays as it was"

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca, self._given = cert, key, client_ca, None
        super().__init__([path for path in (cert, key, client_ca) if path])

    @classmethod
    def of(cls, options: Options) -> Self | None:
        """Read the certificate that options name; None if they name none."""
        cert, key = options.tls_cert, options.tls_key
        return cls(cert, key, options.client_ca) if cert and key else None

    @property
    def context(self) -> ssl.SSLContext:
        """The context for connections that begin now."""
        return self._now.context

    def credentials(self) -> Any:
        """Return credentials for a gRPC server, which asks for the certificate at each handshake."""
        self._given = self._now.configuration
        return grpc.dynamic_ssl_server_credentials(
            self._given, self._fetch, require_client_authentication=self._client_ca is not None
        )

    def _fetch(self) -> Any:
        """Return the certificate if it is not the one that was returned last (grpc's interface)."""
        if self._given is self._now.configuration:
            return None
        self._given = self._now.configuration
        return self._given

    def take(self, found: _Read) -> None:
        """Put a certificate into effect."""
        self._now = found

    def read(self) -> _Read:
        """Read the files, and check that clients can use what is in them."""
        cert = _read("--tls-cert", self._cert, "CERTIFICATE")
        key = _read("--tls-key", self._key, "PRIVATE KEY")
        authorities = _read("--client-ca", self._client_ca, "CERTIFICATE") if self._client_ca else None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_ciphers(_CIPHERS)
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._cert, self._key, password=refuse_password)
            _shake_hands(context, self._cert)
            if self._client_ca:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLCertVerificationError as error:
            raise InputError(f"--tls-cert {self._cert}: {error.verify_message}.", "Renew it.") from None
        except (ssl.SSLError, ValueError, OSError) as error:
            reason = getattr(error, "reason", None) or str(error)
            raise InputError(
                f"--tls-cert {self._cert} and --tls-key {self._key} cannot be used: {_REASONS.get(reason, reason)}.",
                "Give a certificate and its key, in PEM, without a password.",
            ) from None
        return _Read(context, grpc.ssl_server_certificate_configuration([(key, cert)], authorities))


def _read(option: str, path: Path, mark: str) -> bytes:
    try:
        content = read_bytes(path, _MOST_BYTES)
        if f"{mark}-----".encode() not in content:
            raise OSError(f"it has no {mark} in PEM")
    except OSError as error:
        raise InputError(f"{option} {path} cannot be used: {error.strerror or error}.", "Give a PEM file.") from None
    return content


def _shake_hands(context: ssl.SSLContext, cert: Path) -> None:
    """Make a handshake in memory with a client that trusts the certificate itself, and so looks at its dates and use.

    Raises:
        SSLError: the handshake failed.
        ValueError: clients over gRPC do not take a key of this kind.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), context.wrap_bio(there, back, server_side=True)
    for _ in range(_FLIGHTS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    shown = ends[0].getpeercert(binary_form=True) or b""
    if not any(kind in shown for kind in _KINDS):
        raise ValueError(_WRONG_KIND)
