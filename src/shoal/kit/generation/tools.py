"""Tools (functions) that the answer to a chat may call, as a request has them.

A request has them beside the variables of its chat template: ``tools``, a list as OpenAI's API and transformers have
it; ``tool_choice``; and ``parallel_tool_calls``. The template writes the tools into the prompt, ``tool_forms`` has the
grammars of calls, and ``calls.CallReader`` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shorten
from typing import Any

from shoal.errors import InputError

TOOLS, CHOICE, PARALLEL = "tools", "tool_choice", "parallel_tool_calls"
ASKS = frozenset({TOOLS, CHOICE, PARALLEL})
NONE, AUTO, REQUIRED = CHOICES = "none", "auto", "required"
MOST_TOOLS = 128
MOST_BYTES = 2**18  # of tools as JSON
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)
_EXAMPLE = 'Send a list of {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}.'


@dataclass(frozen=True)
class AskedTools:
    """Tools of one request, and which of them the answer may or must call."""

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = AUTO  # one of CHOICES, or the name of a tool
    is_parallel: bool = True

    @property
    def callable(self) -> list[Mapping[str, Any]]:
        """The functions that the answer may call."""
        functions = [tool["function"] for tool in self.tools if self.choice != NONE]
        return [each for each in functions if self.choice in (*CHOICES, each["name"])]


def split_asked(variables: Mapping[str, Any], name: str = "") -> tuple[dict[str, Any], AskedTools]:
    """Return a template's variables without those of tools, and the tools; ``name`` is the variables', for errors.

    Raises:
        InputError: the tools, or the choice, are not valid.
    """
    rest = {key: value for key, value in variables.items() if key not in ASKS}
    place = f"{name}." if name else ""
    tools, is_parallel = variables.get(TOOLS) or (), variables.get(PARALLEL, True)
    if not isinstance(tools, list | tuple):
        raise InputError(f"{place}{TOOLS} is {shorten(tools)}, expected a list.", _EXAMPLE)
    if len(tools) > MOST_TOOLS:
        raise InputError(f"{place}{TOOLS} has {len(tools)} tools; at most {MOST_TOOLS} are read.", "Send fewer.")
    if (size := len(json.dumps(tools))) > MOST_BYTES:
        raise InputError(f"{place}{TOOLS} has {size} bytes as JSON; at most {MOST_BYTES} are read.", "Shorten them.")
    names: list[str] = []
    for index, tool in enumerate(tools):
        if fault := _find_fault(tool, names):
            raise InputError(f"{place}{TOOLS}[{index}]{fault}.", _EXAMPLE)
        names.append(tool["function"]["name"])
    if not isinstance(is_parallel, bool):
        raise InputError(f"{place}{PARALLEL} is {shorten(is_parallel)}.", "Send true or false.")
    choice = variables.get(CHOICE, AUTO)
    known = ", ".join([*CHOICES, *names])
    if not isinstance(choice, str) or choice not in (*CHOICES, *names):
        raise InputError(f"{place}{CHOICE} is {shorten(choice)}, expected one of {known}.", "Send one of them.")
    if not names and choice not in (NONE, AUTO):
        raise InputError(f"{place}{CHOICE} is {choice}, and there are no {TOOLS}.", f"Send {TOOLS}.")
    return rest, AskedTools(tuple(tools), choice, is_parallel and choice in CHOICES)  # a named one is called once


def _find_fault(tool: Any, names: Sequence[str]) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        return f" is {shorten(tool)}, expected a function"
    if not isinstance(function, Mapping) or "name" not in function:
        return ".function has no name"
    name, schema = function["name"], function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f".function.name is {shorten(name)}, expected 1 to 128 letters, digits, _, - or ."
    if name in CHOICES:
        return f".function.name is {name!r}, which {CHOICE} has as another value"
    if name in names:
        return f".function.name is {name!r}, which another tool has"
    if schema is not None and not isinstance(schema, Mapping):
        return f".function.parameters is {shorten(schema)}, expected a JSON schema, an object"
    return ""
