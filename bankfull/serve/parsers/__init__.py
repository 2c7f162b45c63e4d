"""Parsers that split a model's output into reasoning, tool calls and text.

`reader` reads text that arrives in pieces, `writer` collects events, `session` joins the two. Each tool call format has
its own file; `registry` selects the format from the chat template's source.
"""

from bankfull.serve.parsers.registry import PlainParser, grammar_for, parser_for
from bankfull.serve.parsers.session import Parser

__all__ = ["Parser", "PlainParser", "grammar_for", "parser_for"]
