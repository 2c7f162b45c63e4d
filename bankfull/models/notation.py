"""The notation of a model's layers: "6 x [5 x local(1024), global]".

    layers := item {"," item}
    item   := [count "x"] (layer | "[" layers "]")
    layer  := call {"+" call}                 several calls are mixers that run in parallel in one layer
    call   := name ["(" value {"," value} ")"]
    value  := [name "="] (number | name)      the first value may leave out its name

The text may come from an untrusted file. Layers are counted before they are expanded, so a short text cannot demand
more memory than `MAX_LAYERS` layers take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bankfull.errors import ModelError
from bankfull.models.fields import MAX_LAYERS

LONGEST_TEXT = 1 << 16
"""Characters of a text, at most."""
DEEPEST = 32
"""Brackets inside one another, at most: the parser calls itself for each."""
_TOKEN = re.compile(
    r"\s*(?:([0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)(?:(?![\w.])|(?=x\b))|([A-Za-z_][\w.-]*)|([-\[\](),=+]))", re.ASCII
)
_DIGITS = 12
"""Digits of a number, at most."""

Value = int | float | str


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A block by its name, with values for its settings."""

    name: str
    values: tuple[tuple[str | None, Value], ...] = ()
    """Setting and value; the setting of the first may be None, which is the block's main setting."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: a block, or several that run in parallel."""

    calls: tuple[BlockCall, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    count: int
    items: tuple[Layer | Repeat, ...]


Item = Layer | Repeat


def parse(text: str) -> tuple[Item, ...]:
    """The items of a text; ModelError names the place of a mistake."""
    if len(text) > LONGEST_TEXT:
        raise ModelError(f"The layers are a text of {len(text)} characters; write at most {LONGEST_TEXT}, or a list.")
    return _Parser(text).whole()


def written(items: Sequence[Item]) -> str:
    """The text of items; `parse` returns the same items."""
    return ", ".join(_written(item) for item in items)


def count(items: Iterable[Item]) -> int:
    """Layers of the items, without expanding them."""
    return sum(1 if isinstance(item, Layer) else item.count * count(item.items) for item in items)


def expanded(items: Sequence[Item]) -> list[Layer]:
    """All layers in order."""
    layers = count(items)
    if not 1 <= layers <= MAX_LAYERS:
        raise ModelError(f"The layers expand to {_short(layers)} layers; a model has from 1 to {MAX_LAYERS}.")
    return _expand(items)


def _expand(items: Sequence[Item]) -> list[Layer]:
    layers: list[Layer] = []
    for item in items:
        layers += [item] if isinstance(item, Layer) else _expand(item.items) * item.count
    return layers


def _short(number: int) -> str:
    return str(number) if number < 10**_DIGITS else f"over 10^{_DIGITS}"


def _written(item: Item) -> str:
    if isinstance(item, Layer):
        return " + ".join(_call(call) for call in item.calls)
    single = len(item.items) == 1 and isinstance(item.items[0], Layer)
    inner = written(item.items)
    return f"{item.count} x {inner if single else f'[{inner}]'}"


def _call(call: BlockCall) -> str:
    if not call.values:
        return call.name
    return f"{call.name}({', '.join(_value(name, value) for name, value in call.values)})"


def _value(name: str | None, value: Value) -> str:
    return str(value) if name is None else f"{name}={value}"


class _Parser:
    """Recursive descent over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split(text))
        self._next = 0

    def _split(self, text: str) -> Iterable[tuple[str, str, int]]:
        place, end = 0, len(text.rstrip())
        while place < end:
            match = _TOKEN.match(text, place)
            if match is None:
                at = place + len(text[place:]) - len(text[place:].lstrip())
                raise self._wrong(f"{text[at]!r} cannot stand there", at)
            kind = ("number", "name", "sign")[(match.lastindex or 1) - 1]
            yield kind, match[match.lastindex or 0], match.start(match.lastindex or 0)
            place = match.end()

    def whole(self) -> tuple[Item, ...]:
        items = self._items(0)
        if self._next < len(self._tokens):
            raise self._unexpected("a comma or the end")
        return items

    def _items(self, depth: int) -> tuple[Item, ...]:
        if depth > DEEPEST:
            raise ModelError(f"The layers have more than {DEEPEST} brackets inside one another; write fewer.")
        items = [self._item(depth)]
        while self._take("sign", ","):
            items.append(self._item(depth))
        return tuple(items)

    def _item(self, depth: int) -> Item:
        if self._peek()[0] == "number":
            times = self._whole_number()
            if not self._take("name", "x"):
                raise self._unexpected("'x' after a number")
            if times < 1:
                raise ModelError(f"The layers repeat a part {times} times; repeat it at least once.")
            if self._take("sign", "["):
                return Repeat(times, self._bracket(depth))
            return Repeat(times, (self._layer(),))
        if self._take("sign", "["):
            return Repeat(1, self._bracket(depth))
        return self._layer()

    def _bracket(self, depth: int) -> tuple[Item, ...]:
        items = self._items(depth + 1)
        self._demand("]")
        return items

    def _layer(self) -> Layer:
        calls = [self._call()]
        while self._take("sign", "+"):
            calls.append(self._call())
        return Layer(tuple(calls))

    def _call(self) -> BlockCall:
        kind, name, _ = self._peek()
        if kind != "name":
            raise self._unexpected("a block's name")
        self._next += 1
        if not self._take("sign", "("):
            return BlockCall(name)
        values = [self._setting(first=True)]
        while self._take("sign", ","):
            values.append(self._setting(first=False))
        self._demand(")")
        return BlockCall(name, tuple(values))

    def _setting(self, first: bool) -> tuple[str | None, Value]:
        kind, text, _ = self._peek()
        if kind == "name" and self._peek(1)[:2] == ("sign", "="):
            self._next += 2
            return text, self._any_value()
        if not first:
            raise self._unexpected("NAME=VALUE")
        return None, self._any_value()

    def _any_value(self) -> Value:
        if self._peek()[0] == "name":
            self._next += 1
            return self._tokens[self._next - 1][1]
        negative = self._take("sign", "-")
        kind, text, _ = self._peek()
        if kind != "number":
            raise self._unexpected("a number or a name")
        value: int | float = self._whole_number() if text.isdigit() else self._fraction()
        return -value if negative else value

    def _whole_number(self) -> int:
        kind, text, place = self._peek()
        if kind != "number" or not text.isdigit():
            raise self._unexpected("a whole number")
        if len(text) > _DIGITS:
            raise self._wrong(f"a number of {len(text)} digits is too large", place)
        self._next += 1
        return int(text)

    def _fraction(self) -> float:
        text, place = self._peek()[1:]
        if len(text) > 2 * _DIGITS or (value := float(text)) > 1e30:
            raise self._wrong("this number is too long or too large", place)
        self._next += 1
        return value

    def _peek(self, ahead: int = 0) -> tuple[str, str, int]:
        place = self._next + ahead
        return self._tokens[place] if place < len(self._tokens) else ("end", "", len(self._text))

    def _take(self, kind: str, text: str) -> bool:
        taken = self._peek()[:2] == (kind, text)
        self._next += taken
        return taken

    def _demand(self, sign: str) -> None:
        if not self._take("sign", sign):
            raise self._unexpected(repr(sign))

    def _unexpected(self, wanted: str) -> ModelError:
        kind, text, place = self._peek()
        actual = "the text ends" if kind == "end" else f"{text[:40]!r} stands"
        return self._wrong(f"{actual} where {wanted} is expected", place)

    def _wrong(self, problem: str, place: int) -> ModelError:
        near = self._text[max(0, place - 20) : place + 20]
        return ModelError(f"The layers cannot be read: {problem} (character {place + 1}, near {near!r}).")
