"""The environment that chat templates run in: a template is a program from a stranger.

jinja2's immutable sandbox keeps a template away from Python's internals and from what it was given. How long it runs
and how much it makes is limited by the system, in a process of its own (`render_worker`): whatever a template calls,
nothing here has to know its name.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import meta, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bankfull.text.noncharacters import NONCHARACTERS

_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")


class Raised(TemplateError):
    """The template refused its input, in its own words."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Runs chat templates with the helpers that they expect."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationBlock],
            optimized=False,
            cache_size=0,
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson

    def template(self, source: str) -> tuple[Template, set[str]]:
        """The compiled template, and the variables that it reads without setting them first."""
        tree = self.parse(source)
        variables = meta.find_undeclared_variables(tree)
        code = self.compile(tree, filename="<chat template>")
        return Template.from_code(self, code, self.make_globals(None)), variables

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # The sandbox would hand out an undefined value, which prints as nothing.
        raise SecurityError(f"the attribute {attribute} of {type(obj).__name__} is not allowed in a chat template")


class GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote; it matters in training only."""

    tags: set[str] = {"generation"}  # noqa: RUF012, as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # A noncharacter stays as it is: it may be the marker that keeps a spelling as text.
        text = re.sub(f"[^\x00-\x7f{NONCHARACTERS}]", lambda found: json.dumps(found[0])[1:-1], text)
    return text


def _raise(message: Any = "") -> NoReturn:
    raise Raised(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
