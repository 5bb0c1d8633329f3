"""Certificates of a service, which follow their files, and TLS of clients."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from typer.testing import CliRunner

import shoal
from shoal.cli import app
from shoal.clients.client.failures import Peer, connection_failure, explain, grpc_failure
from shoal.clients.client.flow import read_url
from shoal.clients.client.tls import Tls
from shoal.errors import InputError, ServerError
from shoal.serving.gateway.http.certificates import Certificates
from shoal.serving.gateway.options import Options
from tests.support.pairs import call_openssl, make_pair
from tests.support.virtual_time import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs ``good``, ``other``, ``old``, ``edwards``; ``secret.key`` has a password."""
    found = tmp_path_factory.mktemp("pairs")
    for name in ("good", "other"):
        make_pair(found, name)
    make_pair(found, "old", is_old=True)
    make_pair(found, "edwards", "-newkey", "ed25519")
    make_pair(found, "clients", "-newkey", "rsa:2048", "-addext", "extendedKeyUsage=clientAuth")
    call_openssl(found, "ec", "-in", "good.key", "-out", "secret.key", "-aes128", "-passout", "pass:long enough")
    (found / "text").write_text("no certificate")
    (found / "broken").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return found


BAD = [
    ("none", "good.key", "--tls-cert none cannot be used: No such file or directory. Give a PEM file."),
    ("good.crt", "none", "--tls-key none cannot be used: No such file or directory. Give a PEM file."),
    ("good.key", "good.key", "--tls-cert good.key cannot be used: it has no CERTIFICATE in PEM. Give a PEM file."),
    ("good.crt", "good.crt", "--tls-key good.crt cannot be used: it has no PRIVATE KEY in PEM. Give a PEM file."),
    ("good.crt", "other.key", "--tls-cert good.crt and --tls-key other.key cannot be used: the key is another "
     "certificate's. Give a certificate and its key, in PEM, without a password."),
    ("good.crt", "secret.key", "--tls-cert good.crt and --tls-key secret.key cannot be used: the key has a password."),
    ("old.crt", "old.key", "--tls-cert old.crt: certificate has expired. Renew it."),
    ("clients.crt", "clients.key", "--tls-cert clients.crt: unsuitable certificate purpose"),
    ("broken", "good.key", "--tls-cert broken and --tls-key good.key cannot be used: "),
    (".", "good.key", "--tls-cert . cannot be used: "),
]  # fmt: skip


CURVE = ("-newkey", "ec", "-pkeyopt")
KINDS = {
    "rsa-2048": (("-newkey", "rsa:2048"), ""), "p-256": ((*CURVE, "ec_paramgen_curve:P-256"), ""),
    "p-384": ((*CURVE, "ec_paramgen_curve:P-384"), ""),
    "rsa-1024": (("-newkey", "rsa:1024"), "the key has too few bits"),
    "p-521": ((*CURVE, "ec_paramgen_curve:P-521"), "gRPC's clients take RSA keys, and those on the curves P-256"),
    "k1": ((*CURVE, "ec_paramgen_curve:secp256k1"), "gRPC's clients take RSA"),
    "ed25519": (("-newkey", "ed25519"), "gRPC's clients take RSA"),
    "ed448": (("-newkey", "ed448"), "gRPC's clients take RSA"),
    "rsa-pss": (("-newkey", "rsa-pss", "-pkeyopt", "rsa_keygen_bits:2048"), "gRPC's clients take RSA"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_keys_are_those_of_clients(kind: str, tmp_path: Path) -> None:
    """Clients of gRPC and of HTTP reach a server with each key that is taken; the others are refused at once."""
    options, reason = KINDS[kind]
    cert, key = make_pair(tmp_path, "localhost", *options)
    if reason:
        with pytest.raises(InputError) as caught:
            Certificates(cert, key)
        assert str(caught.value).startswith(f"--tls-cert {cert} and --tls-key {key} cannot be used: {reason}")
        return
    certificates = Certificates(cert, key)

    async def call() -> grpc.StatusCode:
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", certificates.credentials())
        await server.start()
        trusted = grpc.ssl_channel_credentials(cert.read_bytes())
        try:
            async with grpc.aio.secure_channel(f"localhost:{port}", trusted) as channel:
                await channel.unary_unary("/none")(b"", timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
        finally:
            await server.stop(None)
        raise AssertionError

    assert asyncio.run(call()) == grpc.StatusCode.UNIMPLEMENTED
    assert asyncio.run(shake_hands(certificates, cert)) == "localhost"


@pytest.mark.parametrize(("cert", "key", "message"), BAD)
def test_what_cannot_be_served_is_refused(
    cert: str, key: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InputError) as caught:
        Certificates(Path(cert), Path(key))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_authorities_of_clients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    pair = Path("good.crt"), Path("good.key")
    with pytest.raises(InputError, match=r"^--client-ca text cannot be used: it has no CERTIFICATE in PEM\."):
        Certificates(*pair, Path("text"))
    assert Certificates(*pair).context.verify_mode is ssl.CERT_NONE
    found = Certificates(*pair, Path("other.crt")).context
    assert (found.verify_mode, found.minimum_version) == (ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_2)


@pytest.mark.parametrize(
    "given", [["--tls-cert", "a"], ["--tls-key", "a"], ["--client-ca", "a"], ["--tls-key", "a", "--client-ca", "b"]]
)
def test_options_that_need_one_another(given: list[str]) -> None:
    done = CliRunner().invoke(app, ["serve", "r", *given])
    assert str(done.exception) == "TLS needs a certificate and its key. Give both: --tls-cert FILE --tls-key FILE"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--allow-host", "a", "--open"], "--allow-host a has no effect: all hosts are allowed. Leave it out."),
        (["--allow-host", "http://a"], "--allow-host 'http://a' is not a host. Give a name: --allow-host gpu-1"),
        (["--allow-host", "a:8000"], "--allow-host 'a:8000' is not a host."),
        (["--allow-host", ""], "--allow-host '' is not a host."),
        (
            ["--tls-cert", "a", "--tls-key", "b", "--print", "--bare"],
            "--tls-cert has no effect with --bare: Triton has no",
        ),
    ],
)
def test_options_without_effect(given: list[str], message: str) -> None:
    assert str(CliRunner().invoke(app, ["serve", "r", *given]).exception).startswith(message)


def test_a_service_without_tls() -> None:
    assert Certificates.of(Options()) is None


async def shake_hands(certificates: Certificates, trusted: Path) -> str:
    """Return the name in the certificate of a connection that begins now; empty if it is not ``trusted``."""

    async def serve(_: Any, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certificates.context)
    host, port = server.sockets[0].getsockname()
    async with server:
        try:
            _, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context(cafile=trusted))
        except ssl.SSLError:
            return ""
        names: Any = writer.get_extra_info("peercert")["subject"]
        writer.transport.abort()
    return str(names[0][0][1])


def test_a_changed_pair_is_taken_and_a_broken_one_is_not(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def put(name: str, *ends: str) -> None:
        for end in ends:
            shutil.copy(folder / f"{name}.{end}", tmp_path / f"new.{end}")
            (tmp_path / f"new.{end}").replace(tmp_path / f"pair.{end}")

    caplog.set_level("INFO")

    async def work() -> None:
        put("good", "crt", "key")
        now = [0.0]
        certificates = Certificates(tmp_path / "pair.crt", tmp_path / "pair.key")
        certificates._clock = lambda: now[0]
        certificates.credentials()

        async def look(seconds: int) -> None:
            for _ in range(seconds):
                now[0] += 1
                await certificates.look()

        async def name() -> str:
            return await shake_hands(certificates, folder / "good.crt") or await shake_hands(
                certificates, folder / "other.crt"
            )

        assert await name() == "good"
        assert certificates._fetch() is None
        put("other", "crt")  # without its key
        await look(125)
        told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 3
        assert told[0].startswith("The certificate stays as it was: --tls-cert ")
        assert (await name(), certificates._fetch()) == ("good", None)
        put("other", "key")
        await look(1)
        assert await name() == "other"
        assert certificates._fetch() is not None
        assert certificates._fetch() is None
        (tmp_path / "pair.crt").unlink()
        await look(2)
        assert await name() == "other"
        put("old", "crt", "key")
        await look(2)
        assert await name() == "other"
        put("edwards", "crt", "key")  # of a kind that gRPC's clients do not take
        await look(2)
        assert await name() == "other"
        put("good", "crt", "key")
        await look(1)
        assert await name() == "good"
        assert caplog.messages[-1].startswith("Read again: ")

    asyncio.run(work())


def test_files_that_are_being_replaced_are_read_again(folder: Path, tmp_path: Path) -> None:
    for end in ("crt", "key"):
        shutil.copy(folder / f"good.{end}", tmp_path / f"pair.{end}")

    class Slow(Certificates):
        num_reads = 0

        def read(self) -> Any:
            found = super().read()
            self.num_reads += 1
            os.utime(tmp_path / "pair.key", (self.num_reads, self.num_reads))  # another write, meanwhile
            return found

    async def work() -> None:
        certificates = Slow(tmp_path / "pair.crt", tmp_path / "pair.key")
        before = certificates.context
        await certificates.look()
        assert (certificates.num_reads, certificates.context) == (2, before)

    run(work())


# --- clients ---------------------------------------------------------------------------------------------------------


def test_addresses_with_tls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    for protocol, scheme in (("grpc", "grpcs"), ("http", "https")):
        address, tls = read_url(f"{scheme}://gpu-1:9/", protocol)
        assert address == "gpu-1:9"
        assert isinstance(tls, Tls)
        assert (tls.context.verify_mode, tls.authorities) == (ssl.CERT_REQUIRED, None)
        assert read_url("gpu-1:9", protocol) == read_url(f"{protocol}://gpu-1:9", protocol) == ("gpu-1:9", None)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "good.crt"))
    _, tls = read_url("https://gpu-1:9", "http", client_cert=str(join(folder)))
    assert tls is not None
    assert tls.authorities == (folder / "good.crt").read_bytes()
    assert len(tls.context.get_ca_certs()) == 1
    assert tls.own == join(folder).read_bytes()


def join(folder: Path) -> Path:
    """Return a file with a certificate and its key."""
    both = folder / "both.pem"
    both.write_bytes((folder / "other.crt").read_bytes() + (folder / "other.key").read_bytes())
    return both


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("https://a:1", {}, "https://a:1 names the protocol https; this client speaks grpc, with TLS grpcs. Give the "
         "address alone, https://a:1, and the protocol: --protocol http, in Python protocol='http'"),
        ("grpcs://a:1", {"protocol": "http"}, "grpcs://a:1 names the protocol grpcs; this client speaks http"),
        ("a:1", {"ca_cert": "x"}, "ca_cert has no effect without TLS. Give the address with its scheme: grpcs://a:1"),
        ("", {"client_cert": "x"}, "client_cert has no effect without TLS. Give the address with its scheme: "
         "grpcs://127.0.0.1:8001"),
        ("grpcs://a:1", {"ca_cert": "none"}, "none cannot be used for TLS: No such file or directory. Give PEM"),
        ("grpcs://a:1", {"ca_cert": "text"}, "text cannot be used for TLS: NO_CERTIFICATE_OR_CRL_FOUND. Give"),
        ("grpcs://a:1", {"client_cert": "good.crt"}, "good.crt cannot be used for TLS: "),
        ("grpcs://a:1", {"client_cert": "secret.key"}, "secret.key cannot be used for TLS: "),
    ],
)  # fmt: skip
def test_what_a_client_refuses(
    url: str, options: Any, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(InputError) as caught:
        shoal.Client(url, **options)
    assert str(caught.value).startswith(message)
    with pytest.raises(InputError, match="TLS"):
        shoal.AsyncClient(url, **options)


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("CERTIFICATE_VERIFY_FAILED: self signed certificate: OK", "self signed certificate"),
        ("WRONG_VERSION_NUMBER: Invalid certificate verification context: OK", "it has no TLS"),
    ],
)
def test_a_server_that_is_not_trusted(details: str, reason: str) -> None:
    call: Any = type("Call", (), {"request_id": ""})
    said = f"failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Tls handshake failed: {details}"
    for failure in (
        grpc_failure("UNAVAILABLE", said.replace(" failed: ", " failed: SSL_ERROR_SSL: ")),
        connection_failure(ssl.SSLError(1, f"[SSL: X] {details.lower().replace('_', ' ')} (_ssl.c:1006)")),
    ):  # fmt: skip
        assert str(explain(failure, call, Peer("here:1", "grpc", 1.0))) == (
            f"No secure connection to the server at here:1 was made: {reason}. If the certificate is right, name its "
            "authority: --ca-cert FILE, in Python ca_cert=..."
        )


@pytest.mark.parametrize("is_async", [False, True])
def test_a_closed_client_leaves_no_connection(is_async: bool, folder: Path) -> None:
    """A server ends a connection, and does not confirm its client's end of TLS."""
    listening = socket.create_server(("127.0.0.1", 0))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "good.crt", folder / "good.key")
    ends = []

    def serve() -> None:
        with listening, listening.accept()[0] as plain:
            below = plain.dup()
            with context.wrap_socket(plain, server_side=True) as secure, below:
                secure.recv(1000)
                secure.sendall(b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
                below.settimeout(60)
                with suppress(ConnectionResetError):
                    while below.recv(1000):
                        pass
                ends.append(True)

    serving = threading.Thread(target=serve)
    serving.start()
    url = f"https://127.0.0.1:{listening.getsockname()[1]}"
    options: dict[str, Any] = {"protocol": "http", "retries": 0, "ca_cert": folder / "good.crt"}

    def ask() -> None:
        with shoal.Client(url, **options) as client:
            client.describe("m")

    async def ask_async() -> None:
        async with shoal.AsyncClient(url, **options) as client:
            await client.describe("m")

    with pytest.raises(ServerError, match="wants a key"):
        asyncio.run(ask_async()) if is_async else ask()
    serving.join()
    assert ends
