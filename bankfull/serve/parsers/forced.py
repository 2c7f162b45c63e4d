"""Grammars that force a model to call a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bankfull.errors import RequestError
from bankfull.sample.params import StructuredOutput
from bankfull.serve.parsers.tools import ToolSpec


@dataclass(frozen=True, slots=True)
class ForcedForm:
    before: str
    between: str
    after: str
    key: str = "arguments"


TAGGED = ForcedForm("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LIST = ForcedForm("[", ", ", "]")
OBJECTS = ForcedForm("", "; ", "", "parameters")

# Fixed spacing: a small model could generate spaces without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


# Keywords that describe more than an object's own properties. A schema with one of them keeps additional properties.
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
    form: ForcedForm, tools: Sequence[ToolSpec], several: bool, reasoning_end: str | None
) -> StructuredOutput:
    """A Lark grammar. Each tool's schema is a separate root, so its `$ref`s stay valid. `reasoning_end` closes
    reasoning that the prompt has opened."""
    more = f" ({_quoted(form.between)} call)*" if several else ""
    calls = f"call{more} {_quoted(form.after)}"
    if reasoning_end:
        before = _quoted("\n\n" + form.before)
        lines = [f"start: reasoning {before} {calls}", f"reasoning[suffix={_quoted(reasoning_end)}]: /(?s:.*)/"]
    else:
        lines = [f"start: {_quoted(form.before)} {calls}"]
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        header = f'{{"name": {_quoted(tool.name)}, "{form.key}": '
        lines.append(f'call_{index}: {_quoted(header)} arguments_{index} "}}"')
        lines.append(f"arguments_{index}: %json {_schema(tool)}")
    return StructuredOutput(grammar="\n".join(lines) + "\n")


def _schema(tool: ToolSpec) -> str:
    try:
        schema = closed({**tool.parameters, "type": "object"})
        return msgspec.json.encode({**schema, "x-guidance": _SPACING}).decode()
    except (TypeError, ValueError, RecursionError):
        raise RequestError(f"the parameters of tool {tool.name[:80]!r} are not a JSON schema.") from None


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with additional properties forbidden, unless it mentions them itself: an unconstrained model would
    invent properties without end."""
    strict = dict(schema)
    named, items = strict.get("properties"), strict.get("items")
    if isinstance(named, Mapping):
        strict["properties"] = {key: closed(one) if isinstance(one, Mapping) else one for key, one in named.items()}
        if not _COMPOSED & strict.keys():
            strict["additionalProperties"] = False
    if isinstance(items, Mapping):
        strict["items"] = closed(items)
    return strict


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
