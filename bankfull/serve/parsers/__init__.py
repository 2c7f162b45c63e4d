"""What models write, understood: reasoning, tool calls, and text.

`reader` reads text that comes in pieces, `writer` collects events, `session` joins the two; one file per format;
`registry` picks the format by the chat template's source.
"""

from bankfull.serve.parsers.registry import PlainParser, grammar_for, parser_for
from bankfull.serve.parsers.session import Parser

__all__ = ["Parser", "PlainParser", "grammar_for", "parser_for"]
