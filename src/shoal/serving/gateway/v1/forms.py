"""Forms of answers in the words of each API, as the setting ``guide`` of language models."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shoal.serving.gateway.v1.errors import ApiError

Schema = dict[str, Any] | bool


class TextForm(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""

    @property
    def guide(self) -> dict[str, Any] | None:
        """The model's setting; None for any text."""
        return None


class ObjectForm(TextForm, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object."""

    @property
    def guide(self) -> dict[str, Any] | None:
        return {"json_object": True}


class SchemaForm(TextForm, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema, as in Responses and Messages; it is followed whether ``strict`` asks for it or not."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None

    @property
    def guide(self) -> dict[str, Any] | None:
        return {"json": self.schema}


class NamedSchema(Struct, forbid_unknown_fields=True):
    """Schema of a chat's answer, which is followed whether ``strict`` asks for it or not."""

    name: str
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class ChatSchemaForm(TextForm, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema, as in chats."""

    json_schema: NamedSchema

    @property
    def guide(self) -> dict[str, Any] | None:
        schema = self.json_schema.schema
        return {"json_object": True} if schema is None else {"json": schema}


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """Grammar of an answer, as in vLLM: one of these."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def guide(self) -> dict[str, Any]:
        """The model's setting."""
        names = (name for name in self.__struct_fields__ if getattr(self, name) is not None)
        return {name: getattr(self, name) for name in names}


ChatForm = TextForm | ObjectForm | ChatSchemaForm
Form = TextForm | ObjectForm | SchemaForm


def find_guide(**given: TextForm | StructuredOutputs | None) -> dict[str, Any]:
    """Return the setting ``guide`` of a request, by the fields that have a form; at most one of them."""
    found = {name: guide for name, form in given.items() if form is not None and (guide := form.guide) is not None}
    if len(found) > 1:
        raise ApiError(f"The request has {' and '.join(found)}. Send one of them.", next(iter(found)))
    return {"guide": next(iter(found.values()))} if found else {}
