"""The tools of a request, in the form of any API."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bankfull.errors import RequestError

MakeId = Callable[[], str]
_NINE_CHARACTERS = re.compile(r"length\s*!=\s*9\b")
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolSpec:
    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""


def tools_of(
    tools: Sequence[Mapping[str, Any]] | None, tool_choice: str | Mapping[str, Any] | None
) -> dict[str, ToolSpec]:
    """The tools that may be called, by name: all, the chosen one, or none."""
    if not tools or tool_choice == "none":
        return {}
    offered = {tool.name: tool for tool in map(_tool, tools)}
    if isinstance(tool_choice, Mapping):
        name = _chosen_name(tool_choice)
        if name not in offered:
            raise RequestError(f"tool_choice names {name[:80]!r}, which is not in tools: name one of the tools.")
        return {name: offered[name]}
    if tool_choice not in (None, "auto", "required"):
        raise RequestError(
            f"tool_choice is {str(tool_choice)[:80]!r}: use none, auto, required, or an object that names a tool."
        )
    return offered


def is_forced(tool_choice: str | Mapping[str, Any] | None) -> bool:
    return tool_choice == "required" or isinstance(tool_choice, Mapping)


def id_maker(template_source: str) -> MakeId:
    """Ids are `call_` and 24 hex digits, or nine letters and digits for templates that require them."""
    if _NINE_CHARACTERS.search(template_source):
        return lambda: "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return lambda: "call_" + secrets.token_hex(12)


def _tool(spelled: Mapping[str, Any]) -> ToolSpec:
    inner = spelled.get("function")
    fields = inner if isinstance(inner, Mapping) else spelled
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError("tools has an entry without a name: each tool needs one.")
    parameters = fields.get("parameters", fields.get("input_schema"))
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"the parameters of tool {name[:80]!r} must be a JSON schema object.")
    return ToolSpec(name, parameters)


def _chosen_name(choice: Mapping[str, Any]) -> str:
    inner = choice.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
    if not isinstance(name, str):
        raise RequestError('tool_choice is an object that names no tool: give {"function": {"name": ...}}.')
    return name
