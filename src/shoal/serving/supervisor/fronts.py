"""What both front doors do alike: the words of refusals, and what of an answer is for clients."""

from __future__ import annotations

import re

from shoal.serving.supervisor.gate import RefusedError
from shoal.serving.supervisor.logs import log

# Triton's words where the process of a model has died, at once or while it waited for a turn.
_DEAD = re.compile(r"Stub process '.*' is not healthy|Failed to process the request\(s\).*Broken pipe")
_TRACE = re.compile(r"\n+At:\n.*", re.DOTALL)


def is_dead(message: str) -> bool:
    """Whether Triton says that a model's process has died."""
    return bool(_DEAD.search(message))


def clean(message: str) -> str:
    """Triton's message without the traceback, which names paths of the server."""
    return _TRACE.sub("", message)


def words(refused: RefusedError) -> str:
    """The message for clients, with the way out."""
    seconds = max(1, round(refused.retry_after))
    return f"{refused.message} Try again in {seconds} s."


def tell_failure(model: str, request_id: str, message: str) -> None:
    """Log that a request failed which was not at fault itself."""
    log.warning(
        "A request to %s failed: %s", model, message.splitlines()[0] if message else "no reason given",
        extra={"model": model, "request_id": request_id},
    )  # fmt: skip
