"""Output without structure: every text is the visible answer. Stands in for the parsers of tool calls and reasoning."""

from __future__ import annotations

from typing import Any

from bankfull.sample.params import StructuredOutput
from bankfull.serve.events import Event, Text


class Plain:
    wants_special_tokens = False

    def push(self, text: str) -> list[Event]:
        return [Text(text)]

    def finish(self) -> list[Event]:
        return []


def parser_for(
    template_source: str, *, tools: list[dict[str, Any]] | None, tool_choice: str | dict[str, Any] | None,
    reasoning: bool, parallel: bool = True, prompt: str | None = None,
) -> Plain:  # fmt: skip
    return Plain()


def grammar_for(
    template_source: str, tools: list[dict[str, Any]], tool_choice: str | dict[str, Any] | None, parallel: bool,
    *, reasoning: bool = False, prompt: str | None = None,
) -> StructuredOutput | None:
    """No format of calls is known here, so none can be forced."""
    return None
