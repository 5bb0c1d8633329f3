"""Whether the Hugging Face hub can be reached, found out before its library tries again and again for a minute."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from shoal.errors import InputError

_SECONDS = 2.0


def check_hub(name: str, fix: str = "") -> None:
    """Check that the hub answers, unless a model is in its cache, the cache is all that may be used, or a proxy is set.

    ``fix`` is a way out besides a download elsewhere.

    Raises:
        InputError: the hub does not answer.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # no name on the hub: its library says why
        return
    if is_cached or constants.HF_HUB_OFFLINE or getproxies().keys() - {"no"}:
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"There is no folder {name}, and the hub does not answer at {constants.ENDPOINT}: {reason}.",
            fix or f"On a machine that reaches it: hf download {name} --local-dir FOLDER. Bring that here.",
        ) from None
