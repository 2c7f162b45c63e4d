"""The environment that chat templates run in: a template is a program from a stranger.

jinja2's immutable sandbox keeps a template away from Python's internals. It does not keep it from running for ever or
from filling the memory, so here every operation that can repeat or grow reports to a `Meter`: loop steps, calls,
filters, `+ * % **` and `~`, slices, literals, and each `{{ }}`. The template's syntax tree is rewritten to that end;
the names of the added filters contain a bracket, so no template can spell them. Methods and filters are lists of what
is allowed, because one forgotten `int.to_bytes` is enough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from bankfull.text.guard import NONCHARACTERS
from bankfull.text.meter import METER, LimitError, measure

_FILTERS = (
    "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string",
    "sum", "title", "trim", "truncate", "unique", "upper", "wordcount",
)  # fmt: skip
# These return what they were given, or look at it later.
_HANDS_OUT = frozenset(
    {
        "attr", "d", "default", "first", "last", "map", "max", "min", "reject", "rejectattr", "select", "selectattr",
    }
)  # fmt: skip
_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            "capitalize", "casefold", "center", "count", "endswith", "find", "format", "index", "isalnum", "isalpha",
            "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join",
            "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
            "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase",
            "title", "upper", "zfill",
        }
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}  # fmt: skip
_SMALL = 1000  # the largest width, precision or indentation that a template may ask for
_LONG_FIELD = re.compile(r"\d{4,}|\*|\{[^{}]*\{")
_BITS = 512


class Raised(TemplateError):
    """The template refused its input, in its own words."""


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Runs chat templates with the helpers that they expect, within a budget."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationBlock],
            finalize=_printed,
            optimized=False,
            cache_size=0,
        )
        self.globals = {name: self.globals[name] for name in _GLOBALS}
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now
        self._macro_cost = 0
        known = self.filters
        self.filters = {name: _metered(name, known[name]) for name in _FILTERS}
        self.filters["tojson"] = _tojson
        self.filters["[each]"] = _each
        self.filters["[join]"] = _joined
        self.filters["[made]"] = _made
        self.filters["[sliced]"] = _sliced

    def template(self, source: str) -> Template:
        self._macro_cost = len(source)
        tree = self.parse(source)
        _Rewrite().visit(tree)
        return Template.from_code(self, self.compile(tree, filename="<chat template>"), self.make_globals(None))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = METER.get()
        # A macro may write all of the template's own text each time.
        meter.charge(__self._macro_cost if isinstance(__obj, Macro) else 0)
        if isinstance(__obj, BuiltinMethodType):
            args = _checked_method(__obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        # What a mapping hands out existed before; anything else was made now.
        if not (isinstance(__obj, BuiltinMethodType) and isinstance(__obj.__self__, dict)):
            meter.made(result)
            _check_nesting(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = METER.get()
        match operator, left, right:
            case ("*", int(), int()) if left.bit_length() + right.bit_length() > _BITS:
                raise LimitError("it computes with very large numbers")
            case ("**", int(), int()) if left.bit_length() * max(right, 1) > _BITS:
                raise LimitError("it computes with very large numbers")
            case ("*", str() | list() | tuple(), int()):
                meter.afford(len(left) * right * (1 if isinstance(left, str) else 16))
            case ("*", int(), str() | list() | tuple()):
                meter.afford(len(right) * left * (1 if isinstance(right, str) else 16))
            case ("%", str(), _):
                _check_format(left, [right])
        result = super().call_binop(context, operator, left, right)
        meter.made(result)
        _check_nesting(result)
        return result

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # The sandbox would hand out an undefined value, which prints as nothing.
        raise SecurityError(f"the attribute {attribute} of {type(obj).__name__} is not allowed in a chat template")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        if value.__name__ == "format_map":
            raise SecurityError("format_map is not allowed in a chat template")

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, [*args, *kwargs.values()])
            return formatted(*args, **kwargs)

        return bounded


class GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote; it matters in training only."""

    tags: set[str] = {"generation"}  # noqa: RUF012, as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Rewrite(NodeTransformer):
    """Puts the meter's filters where jinja2 has no hook of its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        steps = sum(1 for _ in node.find_all(nodes.Expr))
        self.generic_visit(node)
        node.iter = _filter(node.iter, "[each]", nodes.Const(text + steps))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "[join]")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "[sliced]") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "[made]")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "[made]")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "[made]") if node.ctx == "load" else node


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


# Filters that take the context are never run while the template is compiled.
@pass_context
def _each(context: Context, values: Any, units: int) -> Iterator[object]:
    return METER.get().each(values, units)


@pass_context
def _made(context: Context, value: Any) -> Any:
    METER.get().made(value)
    _check_nesting(value)
    return value


@pass_context
def _sliced(context: Context, value: Any) -> Any:
    METER.get().made(value)
    return value


def _check_nesting(value: Any) -> None:
    if isinstance(value, (list, tuple, dict)):
        measure(value, printable=False)


@pass_context
def _joined(context: Context, values: list[Any]) -> str:
    meter = METER.get()
    texts = [_text(value) for value in values]
    meter.charge(sum(map(len, texts)))
    return "".join(texts)


def _text(value: Any) -> str:
    """What `{{ value }}` prints: plain data only."""
    if isinstance(value, str):
        return value
    count, characters, _ = measure(value, printable=True)
    METER.get().afford(characters + 8 * count)
    return str(value)


@pass_context
def _printed(context: Context, value: Any) -> Any:
    text = _text(value)
    METER.get().charge(len(text))
    return text


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    meter = METER.get()
    count, characters, depth = measure(value, printable=True)
    _check_small([indent])
    meter.afford(6 * characters + count * (8 + depth * (indent or 0)))
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        # A noncharacter stays as it is: it may be the marker that keeps a spelling as text.
        text = re.sub(f"[^\x00-\x7f{NONCHARACTERS}]", lambda found: json.dumps(found[0])[1:-1], text)
    meter.charge(len(text))
    return text


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that looks at what it is asked before it runs, and charges what it made."""
    passed = getattr(function, "jinja_pass_arg", None)

    @wraps(function)
    def filter_(*args: Any, **kwargs: Any) -> Any:
        meter = METER.get(None)
        if meter is None:
            raise SecurityError("a filter ran while the template was compiled")
        own = args[1:] if passed else args
        if not own:
            raise TypeError(f"the filter {name} needs a value")
        subject, options = own[0], [*own[1:], *kwargs.values()]
        meter.charge(0)
        if name in ("batch", "indent", "round", "slice"):
            _check_small(options)
            if name == "indent" and isinstance(subject, str):
                width = next((option for option in options if not isinstance(option, bool)), 4)
                columns = len(width) if isinstance(width, str) else width
                meter.afford(len(subject) + (subject.count("\n") + 1) * columns)
        elif name == "replace":
            _afford_replace(_text(subject), options)
        elif name == "format":
            _check_format(_text(subject), options)
        elif name in ("join", "sum", "list", "max", "min", "sort", "unique", "groupby", "reverse", "dictsort"):
            if not isinstance(subject, (str, dict)):
                subject = list(meter.each(subject))
            if name == "join":
                _afford_join(options[0] if options else "", subject)
            if name == "sum" and any(isinstance(option, (list, tuple)) for option in [*subject, *options]):
                raise LimitError("it sums up lists")
            args = (args[0], subject, *args[2:]) if passed else (subject, *args[1:])
        elif name in ("string", "e", "escape", "lower", "upper", "capitalize", "title", "trim", "safe", "truncate"):
            meter.afford(6 * len(_text(subject)))
        result = function(*args, **kwargs)
        if name not in _HANDS_OUT:
            meter.made(result)
        return result

    return filter_


def _checked_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    subject, name = method.__self__, method.__name__
    allowed = next((names for kind, names in _METHODS.items() if isinstance(subject, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"the method {name} of {type(subject).__name__} is not allowed in a chat template")
    if isinstance(subject, str):
        if name in ("center", "ljust", "rjust", "zfill"):
            _check_small(args)
        elif name == "replace":
            _afford_replace(subject, list(args))
        elif name == "join" and args:
            values = args[0] if isinstance(args[0], str) else list(METER.get().each(args[0]))
            _afford_join(subject, values)
            return (values, *args[1:])
    return args


def _check_small(options: Iterable[Any]) -> None:
    for option in options:
        if (isinstance(option, int) and abs(option) > _SMALL) or (isinstance(option, str) and len(option) > _SMALL):
            raise LimitError(f"it asks for a width, number of parts or precision above {_SMALL}")


def _check_format(pattern: str, values: list[Any]) -> None:
    """Widths may be given in the pattern or, worse, through it."""
    if _LONG_FIELD.search(pattern):
        raise LimitError("it formats with a very wide or computed field")
    size = sum(len(_text(value)) + 2 * _SMALL for value in values)
    METER.get().afford(len(pattern) + size * (pattern.count("{") + pattern.count("%") + 1))


def _afford_replace(text: str, options: list[Any]) -> None:
    if len(options) >= 2 and isinstance(options[0], str) and isinstance(options[1], str):
        METER.get().afford(len(text) + (text.count(options[0]) if options[0] else len(text) + 1) * len(options[1]))


def _afford_join(separator: Any, values: Iterable[Any]) -> None:
    texts = [len(_text(value)) for value in values]
    METER.get().afford(sum(texts) + len(texts) * len(_text(separator)))


def _raise(message: Any = "") -> NoReturn:
    raise Raised(_text(message))


def _strftime_now(pattern: str) -> str:
    _check_small([pattern])
    return datetime.now().strftime(pattern)
