"""Tools for a model whose chat template does not support them: plain messages describe them instead.

The system message describes the tools, assistant messages contain the calls, and user messages the results: every
template supports these roles, in the order that the strictest templates require.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL, RESULT = "tool_call", "tool_response"
"""The tags around a call and around its result."""

_OFFER = "You can call these tools. Each line is one of them, with a JSON schema of its arguments:"
_HOW = f"""\
To call a tool, answer with its name and arguments as JSON between tags, one such block for each call:
<{CALL}>
{{"name": "...", "arguments": {{...}}}}
</{CALL}>
The results come back between <{RESULT}> tags. Where no tool is needed, answer in plain words."""

Message = dict[str, Any]


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, takes_system: bool
) -> list[Message]:
    """The conversation with tools, calls and results as text, in plain JSON values. `takes_system`: whether the
    template supports a system message; otherwise the first user message describes the tools."""
    spoken = _spoken(messages)
    if tools:
        _describe(spoken, "\n".join([_OFFER, *map(_tool, tools), _HOW]), takes_system)
    return spoken


def _spoken(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    spoken: list[Message] = []
    names: dict[object, object] = {}
    results: list[str] = []
    """One user turn: tool results, then the user's message."""
    for message in messages:
        role, calls = message.get("role"), message.get("tool_calls")
        if role == "tool":
            results.append(_result(message, names))
            continue
        if role == "user" and results:
            results.append(_text(message.get("content")))
            continue
        spoken += _turn(results)
        results = []
        spoken.append(dict(message))
        if isinstance(calls, list) and calls:
            names |= {_field(call, "id"): _function(call).get("name") for call in calls}
            del spoken[-1]["tool_calls"]
            spoken[-1]["content"] = _joined(_text(message.get("content")), *map(_call, calls))
    return spoken + _turn(results)


def _turn(texts: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": _joined(*texts)}] if texts else []


def _describe(messages: list[Message], description: str, takes_system: bool) -> None:
    """Append to the system message, or prepend to the first user message."""
    if takes_system and messages and messages[0].get("role") == "system":
        messages[0]["content"] = _joined(_text(messages[0].get("content")), description, between="\n\n")
        return
    asked = next((message for message in messages if message.get("role") == "user"), None)
    if takes_system or asked is None:
        messages.insert(0, {"role": "system" if takes_system else "user", "content": description})
    else:
        asked["content"] = _joined(description, _text(asked.get("content")), between="\n\n")


def _tool(tool: Mapping[str, Any]) -> str:
    function = _function(tool)
    told = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return _json(told)


def _call(call: object) -> str:
    function = _function(call)
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) and _is_json(arguments) else _json(arguments or {})
    return f'<{CALL}>\n{{"name": {_json(function.get("name"))}, "arguments": {written}}}\n</{CALL}>'


def _result(message: Mapping[str, Any], names: Mapping[object, object]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id"))
    content = _text(message.get("content"))
    written = content if _is_json(content) else _json(content)
    told = f'"name": {_json(name)}, ' if name else ""
    return f'<{RESULT}>\n{{{told}"content": {written}}}\n</{RESULT}>'


def _function(value: object) -> Mapping[str, Any]:
    """The function of a tool or a call; either may be wrapped as {"type": "function", "function": ...}."""
    inner = _field(value, "function")
    function = inner if isinstance(inner, Mapping) else value
    return function if isinstance(function, Mapping) else {}


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else None


def _text(content: object) -> str:
    """The text of a message: a string, or a list of parts with text."""
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if isinstance(part, Mapping) and "text" in part)
    return content if isinstance(content, str) else ""


def _joined(*texts: str, between: str = "\n") -> str:
    return between.join(text for text in texts if text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    """Whether the text is a JSON object or list that can be embedded in other JSON."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
