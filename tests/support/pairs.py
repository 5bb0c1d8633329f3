"""Certificates with their keys, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_PAST = """
[ca]
default_ca = own
[own]
database = index
serial = serial
new_certs_dir = .
default_md = sha256
policy = any
[any]
commonName = supplied
"""
P256 = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def make_pair(folder: Path, name: str = "localhost", *options: str, is_old: bool = False) -> tuple[Path, Path]:
    """Make ``NAME.crt``, which certifies itself, for localhost and 127.0.0.1, and ``NAME.key``; return their paths.

    ``options`` are openssl's, by default for a key on the curve P-256. With ``is_old``, it was valid in 2020.
    """
    files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    call_openssl(folder, "req", "-x509", "-nodes", *files, *names, *(options or P256))
    if is_old:
        (folder / "ca.cnf").write_text(_PAST)
        (folder / "index").write_text("")
        (folder / "serial").write_text("01")
        call_openssl(folder, "req", "-new", "-key", f"{name}.key", "-out", "request", *names[:2])
        dates = ["-startdate", "20200101000000Z", "-enddate", "20200201000000Z"]
        given = ["-keyfile", f"{name}.key", "-in", "request", "-out", f"{name}.crt", "-notext"]
        call_openssl(folder, "ca", "-batch", "-selfsign", "-config", "ca.cnf", *given, *dates)
    return folder / f"{name}.crt", folder / f"{name}.key"


def call_openssl(folder: Path, *arguments: str) -> None:
    """Run openssl in a folder; the test is skipped where there is none."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command")
    subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)
