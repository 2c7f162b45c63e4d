"""The jinja2 environment of chat templates. A template is untrusted code.

jinja2's immutable sandbox keeps a template from Python's internals and from changing its input. The operating system
limits time and memory, because the template runs in a process of its own (`render_worker`): these limits hold whatever
the template calls. minijinja counts instructions but not memory, so it would need the same process, and it differs from
jinja2, which models are released with: no `{% generation %}`, `cycler`, `rsplit` or `%`, and other spellings of floats.
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
    """The template called raise_exception."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Runs chat templates with the functions and filters that they use."""

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
        # The sandbox would return an undefined value, which renders as an empty string.
        raise SecurityError(f"the attribute {attribute} of {type(obj).__name__} is not allowed in a chat template")


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text; it is used in training only."""

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
        # A noncharacter is not escaped: it may be the marker that keeps a special token as text (`guard`).
        text = re.sub(f"[^\x00-\x7f{NONCHARACTERS}]", lambda found: json.dumps(found[0])[1:-1], text)
    return text


def _raise(message: Any = "") -> NoReturn:
    raise Raised(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
