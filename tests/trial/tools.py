"""The tools that a chat may offer: their schemas, the grammar of calls, and whether arguments obey."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
TOOLS: dict[str, Schema] = {
    "ab": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    "no": {"type": "object", "properties": {}},
    "es": {"type": "object", "properties": {"b": {"enum": ["yes", 12, None]}, "c": {"enum": [1, 2]}}},
    "an": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": ["ab", ["}"]]}, "maxItems": 2}},
        "required": ["a"],
    },
    "tr": {"type": "object", "properties": {"e": {"type": "string", "maxLength": 3}}, "required": ["e"]},
}
"""By name. The tiny vocabulary spells all of them."""
OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KINDS: Mapping[str, type] = {"boolean": bool, "array": list, "object": dict, "string": str}


def calls(names: Sequence[str], several: bool) -> str:
    """A Lark grammar of one call of these tools, or of one or more."""
    more = f"({json.dumps(CLOSE + chr(10) + OPEN)} call)*" if several else ""
    lines = [f"start: {json.dumps(OPEN)} call {more} {json.dumps(CLOSE)}"]
    lines.append("call: " + " | ".join(f"call_{name}" for name in names))
    for name in names:
        schema = {**TOOLS[name], "additionalProperties": False, "x-guidance": _SPACING}
        head = json.dumps(f'{{"name": "{name}", "arguments": ')
        lines.append(f'call_{name}: {head} arguments_{name} "}}"\narguments_{name}: %json {json.dumps(schema)}')
    return "\n".join(lines) + "\n"


def obeys(value: Any, schema: Schema) -> bool:
    """Whether a value is one of the schema's, for the few keywords that are used here."""
    if "enum" in schema:
        return value in schema["enum"]
    if not isinstance(value, _KINDS[schema["type"]]):
        return False
    if isinstance(value, str | list) and len(value) > schema.get("maxLength", schema.get("maxItems")):
        return False
    if isinstance(value, list):
        return all(obeys(one, schema["items"]) for one in value)
    if not isinstance(value, dict):
        return True
    known = schema["properties"]
    required = set(schema.get("required", ()))
    return required <= value.keys() <= known.keys() and all(obeys(value[name], known[name]) for name in value)
