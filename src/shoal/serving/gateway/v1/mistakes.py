"""Mistakes in requests of OpenAI's API, in the words of its clients: the field, why it is refused, what is meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from shoal.errors import suggest
from shoal.serving.gateway.http.json_scanning import say_kinds
from shoal.serving.gateway.v1.errors import ApiError

# Names that other servers give to texts, and the fields that have them here.
_ALIKE = {*"content contents data docs documents input inputs instances message messages passages".split()}
_ALIKE |= {*"prompt prompts query rows sentence sentences text texts".split()}
_MEANT = "input", "documents", "prompt", "messages", "instances"
_MISSING, _UNKNOWN = "Object missing required field `", "Object contains unknown field `"
_UNSERVED = "unsupported_parameter"
_MOST_WORDS = 2**9  # characters of a message that are read


def explain(kind: type[Struct], message: str, reasons: Mapping[str, str]) -> ApiError:
    """Return the refusal for msgspec's message about a request of ``kind``; ``reasons`` are of fields not served."""
    what, is_placed, place = message.rpartition(" - at `$")
    what, place = (what, place.removesuffix("`").removeprefix(".")) if is_placed else (message, "")
    what = what[:_MOST_WORDS]
    if what.startswith(_UNKNOWN):
        name = what.removeprefix(_UNKNOWN).removesuffix("`")
        param = f"{place}.{name}" if place else name
        if reason := _find_reason(param, reasons):
            return ApiError(f"{param[:100]} is not supported: {reason}.", param[:100], _UNSERVED)
        known = [] if place else [field.name for field in msgspec.structs.fields(kind)]
        meant = [each for each in (f"{name}s", *(_MEANT if name in _ALIKE else ())) if each in known]
        near = f" Did you mean {meant[0]}?" if meant else f" {suggest(name[:60], known)}" if known else ""
        return ApiError(f"Unknown parameter: {param[:100]!r}.{near}", param[:100], "unknown_parameter")
    if what.startswith(_MISSING):
        missing = what.removeprefix(_MISSING).removesuffix("`")
        place = f"{place}.{missing}" if place else missing
        return ApiError(f"The request has no {place}.", place, "missing_required_parameter")
    if "'item_reference'" in what:  # to an item of a response that would be kept; Vercel's client sends it
        store = "send the items themselves; with Vercel's AI SDK, providerOptions: {openai: {store: false}}"
        return ApiError(
            f"{place} is not supported: nothing is stored. Instead of item_reference, {store}.", place, _UNSERVED
        )
    is_function = place.endswith(".role") and "'function'" in what
    reason = reasons["functions"] if is_function else _find_reason(place, reasons)
    if reason or what.startswith("Expected `null`"):
        what = f"is not supported{f': {reason}' if reason else ''}. Leave it out."
        return ApiError(f"{place} {what}", place, _UNSERVED)
    what = say_kinds(what)
    if kind.__name__ == "EmbeddingsRequest" and place.startswith("input["):
        ids = "Send no token ids; LangChain does unless check_embedding_ctx_length=False."
        return ApiError(f"{place} is no text: {what[:100]}. {ids}", place)
    valid = f" Valid: {values}." if (values := ", ".join(map(repr, _find_values(kind, place)))) else ""
    return ApiError(f"{place or 'The request'}: {what[:200]}.{valid}", place or None)


def _find_values(kind: type[Struct], place: str) -> list[Any]:
    """Return the values that the field at a place may have, if its type lists them."""

    def divide(types: list[Any]) -> list[Any]:
        return [each for one in types for each in getattr(one, "types", [one])]  # the types of a union

    found: list[Any] = [msgspec.inspect.type_info(kind)]
    for name in re.findall(r"(\w+)|\[[^]]*\]", place):
        if tags := [each.tag for each in divide(found) if name and getattr(each, "tag_field", None) == name]:
            return tags
        if name:
            fields = [field for each in divide(found) for field in getattr(each, "fields", ())]
            found = [field.type for field in fields if field.encode_name == name]
        else:
            found = [each.item_type for each in divide(found) if hasattr(each, "item_type")]
    return [value for each in divide(found) for value in getattr(each, "values", ())]


def _find_reason(place: str, reasons: Mapping[str, str]) -> str:
    """Return why a field, or one that it is within, is not served; empty if it is served, or unknown."""
    names = [name.partition("[")[0] for name in place.split(".")]
    within = ".".join(names[-2:])  # some reasons are of a field in another one
    found = next((why for name, why in reasons.items() if "." in name and within.endswith(name)), None)
    return next((reasons[name] for name in names if name in reasons), "") if found is None else found
