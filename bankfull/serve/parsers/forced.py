"""Grammars that leave a model no choice but to call a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bankfull.errors import RequestError
from bankfull.sample.params import StructuredOutput
from bankfull.serve.parsers.tools import Tool


@dataclass(frozen=True, slots=True)
class ForcedForm:
    before: str
    between: str
    after: str
    key: str = "arguments"


TAGGED = ForcedForm("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LIST = ForcedForm("[", ", ", "]")
OBJECTS = ForcedForm("", "; ", "", "parameters")

# No freedom in spaces: a small model could write them for ever.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# What says more about an object than its own properties: with one of these it stays open.
_COMPOSED = frozenset(
    (
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "dependentSchemas",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "$ref",
        "$dynamicRef",
    )
)


def forcing_grammar(
    form: ForcedForm, tools: Sequence[Tool], several: bool, thought_end: str | None
) -> StructuredOutput:
    """A Lark grammar. Each tool's schema is a root of its own, so its `$ref`s keep their meaning. `thought_end` closes
    a thought that is already open."""
    more = f" ({_quoted(form.between)} call)*" if several else ""
    calls = f"call{more} {_quoted(form.after)}"
    if thought_end:
        before = _quoted("\n\n" + form.before)
        lines = [f"start: thought {before} {calls}", f"thought[suffix={_quoted(thought_end)}]: /(?s:.*)/"]
    else:
        lines = [f"start: {_quoted(form.before)} {calls}"]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        header = f'{{"name": {_quoted(tool.name)}, "{form.key}": '
        lines.append(f'call_{index}: {_quoted(header)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {_schema(tool)}")
    return StructuredOutput(grammar="\n".join(lines) + "\n")


def _schema(tool: Tool) -> str:
    try:
        schema = closed({**tool.parameters, "type": "object"})
        return msgspec.json.encode({**schema, "x-guidance": _SPACING}).decode()
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"the parameters of tool {tool.name[:80]!r} are not a JSON schema.") from None


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without properties that it does not name, unless it says that there may be others: a model that is
    held by nothing else would invent them for ever."""
    made = dict(schema)
    named, items = made.get("properties"), made.get("items")
    if isinstance(named, Mapping):
        made["properties"] = {key: closed(one) if isinstance(one, Mapping) else one for key, one in named.items()}
        if not _COMPOSED & made.keys():
            made["additionalProperties"] = False
    if isinstance(items, Mapping):
        made["items"] = closed(items)
    return made


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
