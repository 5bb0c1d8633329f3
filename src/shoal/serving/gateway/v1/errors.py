"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from shoal.serving.gateway.core.refusals import RefusedError, Why

_CODES = {
    Why.BUSY: "rate_limit_exceeded", Why.UNAVAILABLE: "service_unavailable", Why.WRONG: "invalid_value",
    Why.ABSENT: "not_found", Why.CLOSED: "permission_denied", Why.METHOD: "method_not_allowed",
    Why.KEY: "invalid_api_key", Why.LARGE: "request_too_large", Why.ENCODING: "unsupported_media_type",
    Why.SLOW: "request_timeout", Why.LIMIT: "rate_limit_exceeded", Why.FAULT: "server_error",
}  # fmt: skip
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(RefusedError):
    """Refusal with OpenAI's ``code``, and the place in the request: ``param``, such as ``messages[2].content``."""

    def __init__(self, message: str, param: str | None = None, code: str = "", why: Why = Why.WRONG) -> None:
        super().__init__(why, message)
        self.param, self.code = param, code or _CODES[why]


def to_envelope(refused: RefusedError, status: int) -> dict[str, Any]:
    """Return the JSON of a refusal."""
    ours = refused if isinstance(refused, ApiError) else None
    return {
        "error": {
            "message": refused.words,
            "type": "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error"),
            "param": ours.param if ours else None,
            "code": ours.code if ours else _CODES[refused.why],
        }
    }
