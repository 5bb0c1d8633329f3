"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from shoal.serving.gateway.refusals import RefusalReason, RefusedError

_CODES = (
    "rate_limit_exceeded service_unavailable invalid_value not_found permission_denied invalid_api_key"
    " rate_limit_exceeded method_not_allowed request_too_large unsupported_media_type request_timeout server_error"
)
_CODE_OF = dict(zip(RefusalReason, _CODES.split(), strict=True))
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(RefusedError):
    """Refusal with OpenAI's ``code``, and the place in the request: ``param``, such as ``messages[2].content``."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "", reason: RefusalReason = RefusalReason.WRONG
    ) -> None:
        super().__init__(reason, message)
        self.param, self.code = param, code or _CODE_OF[reason]


def to_envelope(refused: RefusedError, status: int) -> dict[str, Any]:
    """Return the JSON of a refusal."""
    ours = refused if isinstance(refused, ApiError) else None
    return {
        "error": {
            "message": refused.client_message,
            "type": "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error"),
            "param": ours.param if ours else None,
            "code": ours.code if ours else _CODE_OF[refused.reason],
        }
    }
