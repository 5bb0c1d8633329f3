"""The description of OpenAI's API: an OpenAPI document of the types that check requests, and a page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from shoal.serving.gateway.v1.document import OPERATIONS, describe
from shoal.serving.gateway.v1.document_page import write_page
from tests.support.openai_requests import BOUNDS, KINDS

DOCUMENT = describe()
SCHEMAS = DOCUMENT["components"]["schemas"]


def check(kind: str, value: Any) -> None:
    """Validate a value by a type of the document."""
    schema = {"$ref": f"#/components/schemas/{kind}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def test_the_document_is_complete() -> None:
    """Its schemas are valid, each reference has its schema, and each schema a reference; names are not used twice."""
    for each in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(each)
    used = set(re.findall(r"#/components/schemas/([^\"]+)", json.dumps(DOCUMENT)))
    assert used == SCHEMAS.keys()
    assert all(re.fullmatch(r"\w+", name) for name in SCHEMAS)
    assert [*DOCUMENT["paths"]] == [each.path for each in OPERATIONS]
    assert all(not schema.get("additionalProperties", True) for schema in SCHEMAS.values())


@pytest.mark.parametrize("bounds", BOUNDS, ids=[f"{name} {place}" for name, _, _, place in BOUNDS])
def test_the_document_has_the_bounds(bounds: tuple[str, list[Any], list[Any], str]) -> None:
    name, within, beyond, _ = bounds
    kind, field = name.split()
    known, least = KINDS[kind]
    for value in within:
        check(known.__name__, {**least, field: value})
    for value in beyond:
        with pytest.raises(jsonschema.ValidationError):
            check(known.__name__, {**least, field: value})


def test_the_page_has_no_script() -> None:
    """It names every path and every field of requests, and its links lead to something."""
    page = write_page()
    tags, links, places = set[str](), set[str](), set[str]()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            tags.add(tag)
            found = dict(attrs)
            assert found.keys() <= {"href", "id", "lang", "charset"}
            links.update({found["href"]} if "href" in found else ())
            places.update({f"#{found['id']}"} if "id" in found else ())

    Reader().feed(page)
    assert "script" not in tags
    assert links - places == {"/v1/openapi.json"}
    assert all(each.path in page for each in OPERATIONS)
    for schema in SCHEMAS.values():
        assert all(f"<td>{field}" in page or f"<td>{field} (optional)" in page for field in schema["properties"])
