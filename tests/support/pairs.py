"""Certificates with their keys, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_pair(folder: Path, name: str = "localhost", *options: str, issuer: str = "") -> tuple[Path, Path]:
    """Make ``NAME.crt`` for localhost and 127.0.0.1, and ``NAME.key``; return their paths.

    It is certified by the pair ``issuer`` of the same folder or, without one, by itself. ``options`` are openssl's,
    such as ``-days 2`` or ``-newkey ec -pkeyopt ec_paramgen_curve:P-256``.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl command")
    command = [
        openssl,
        "req",
        "-x509",
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.crt",
    ]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    given = options if "-newkey" in options else ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *options)
    signed = ["-CA", f"{issuer}.crt", "-CAkey", f"{issuer}.key"] if issuer else []
    subprocess.run([*command, *names, *given, *signed], cwd=folder, check=True, capture_output=True)
    return folder / f"{name}.crt", folder / f"{name}.key"
