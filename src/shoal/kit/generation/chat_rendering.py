"""Rendering of chats with a model's template: its own variables, tools, and last messages that are continued."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from reprlib import repr as shorten
from typing import Any

from shoal.errors import InputError
from shoal.kit.generation.chats import Message
from shoal.kit.generation.guides import Guide
from shoal.kit.generation.sampling import CONTINUES, VARIABLES
from shoal.kit.generation.templates import ChatTemplate
from shoal.kit.generation.tool_forms import FORMS, Form, find_form, to_template
from shoal.kit.generation.tool_forms import write_guide as _write_guide
from shoal.kit.generation.tools import ASKS, NONE, TOOLS, split_asked

Render = Callable[[Sequence[Message]], str]
LLAMA2 = "llama2"


class ChatRenderer:
    """Renders chats. Thread-safe.

    ``template`` turns a chat into one text; None if the model takes no chats. ``variables`` are values of its own
    variables, for requests that do not set them. ``form`` is the form of calls of tools; without one, it is found in
    the template.

    Raises:
        InputError: the template does not read one of ``variables``.
    """

    def __init__(
        self,
        template: ChatTemplate | Render | None,
        variables: Mapping[str, Any] | None = None,
        form: Form | None = None,
    ) -> None:
        self._template, self._form = template, form
        self._variables = dict(variables or {})
        self._check_variables(self._variables)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return a chat as one text. ``variables`` are the template's own, those of tools, and ``CONTINUES``.

        Raises:
            InputError: the model takes no chats, or no tools; or the template cannot render this chat, or does not read
                a variable.
        """
        if self._template is None:
            raise InputError(
                "The model has no chat template, and the request has messages.",
                f"Send text_input. For a Llama 2, set the parameter template of the prompt model to {LLAMA2}.",
            )
        own, asked = split_asked(variables, VARIABLES)
        continues = own.pop(CONTINUES, False)
        self._check_variables(own)
        own = self._variables | own
        if (asked.tools and asked.choice != NONE) or any("tool_calls" in message for message in messages):
            form = self._find_form()
            messages = to_template(messages, form)
            own |= {TOOLS: [_complete(tool) for tool in asked.tools]} if asked.choice != NONE else {}
        if continues:
            return self._continue(messages, own)
        if isinstance(self._template, ChatTemplate):
            return self._template.render(messages, variables=own)
        return self._template(messages)

    def write_guide(
        self, variables: Mapping[str, Any], final: Guide | None, find_id: Callable[[str], int | None]
    ) -> tuple[bytes, Form | None]:
        """Return the setting ``guide`` for the tools in ``variables``, and the form of calls; empty and None for none.

        For the arguments see ``tool_forms.write_guide``.

        Raises:
            InputError: the model has no tools.
        """
        if not ASKS & variables.keys():
            return b"", None
        _, asked = split_asked(variables, VARIABLES)
        if not asked.callable:
            return b"", None
        form = self._find_form()
        return _write_guide(asked, form, find_id, final), form

    def close(self) -> None:
        """End the process that renders the template, if there is one."""
        if isinstance(self._template, ChatTemplate):
            self._template.close()

    def _find_form(self) -> Form:
        template = self._template
        if not isinstance(template, ChatTemplate) or not template.reads_tools:
            what = f"{TOOLS} are in the request, and the model's chat template does not read them."
            raise InputError(what, "Leave them out, and calls of them.")
        if self._form is None:
            self._form = find_form(lambda chat, variables: template.render(chat, variables=variables))
        if self._form is None:
            what = "The form in which the model's chat template writes calls is not known."
            raise InputError(what, f"Set the parameter tool_form of the prompt model to one of {', '.join(FORMS)}.")
        return self._form

    def _continue(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return a chat that ends with the text of its last message, an assistant's, as transformers renders it."""
        *before, last = messages
        if last["role"] != "assistant" or not isinstance(self._template, ChatTemplate):
            what = "its last message is not the assistant's" if last["role"] != "assistant" else "its template cannot"
            raise InputError(f"The chat's last message cannot be continued: {what}.", "End with a user's message.")
        mark = f"{secrets.token_hex(8)} "  # the space shows whether the template removes spaces at the end
        marked = [*before, {**last, "content": last["content"] + mark}]
        text = self._template.render(marked, add_generation_prompt=False, variables=variables)
        found, is_there, rest = text.rpartition(mark.strip())
        if not is_there:
            raise InputError("The chat template leaves out the last message.", "End with a user's message.")
        return found if rest.startswith(" ") else found.rstrip()

    def _check_variables(self, names: Iterable[str]) -> None:
        known = self._template.variables if isinstance(self._template, ChatTemplate) else frozenset()
        for name in names:
            if name not in known:
                reads = f"It reads {', '.join(sorted(known))}" if known else "It reads none"
                raise InputError(
                    f"{VARIABLES} has {shorten(name)}, which the model's chat template does not read.",
                    f"{reads}; leave {shorten(name)} out.",
                )


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as transformers' own schemas of functions are: with parameters, and no word about strictness.

    Templates write its members in their order.
    """
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}
