"""What a chat template may spend: units of work and time, charged by every operation that can make something large."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

from jinja2.runtime import Undefined

SECONDS = 1.0
_NODES = 200_000  # in one nested value
_DEPTH = 100


class LimitError(Exception):
    """A template asked for more than it may have."""


class Meter:
    """One rendering's budget. A unit is about a character made, or an operation done."""

    __slots__ = ("_deadline", "_left", "_operations")

    def __init__(self, units: int) -> None:
        self._left = units
        self._operations = 0
        # Processor time of this thread: a busy machine must not fail an honest template.
        self._deadline = time.thread_time() + SECONDS

    def charge(self, units: int) -> None:
        self._left -= units + 1
        if self._left < 0:
            raise LimitError("it makes too much text or runs too many steps")
        self._operations += 1
        if (units > 1000 or self._operations % 16 == 0) and time.thread_time() > self._deadline:
            raise LimitError(f"it runs for more than {SECONDS:g} second")

    def afford(self, units: int) -> None:
        """Refuses something of that size before it is made."""
        if units > self._left:
            raise LimitError("it makes too much text or runs too many steps")

    def made(self, value: object) -> None:
        """Charges a value that was just made: a text by its length, a container by its items."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.charge(16 * len(value))
        else:
            self.charge(0)

    def each(self, values: Iterable[object], units: int = 0) -> Iterator[object]:
        """`values`, each one charged."""
        for value in values:
            self.charge(units)
            yield value


METER: ContextVar[Meter] = ContextVar("meter")


def measure(value: object, *, printable: bool) -> tuple[int, int, int]:
    """Nodes, characters and depth of a nested value, counted as a printer would meet them.

    A value that is shared is counted wherever it occurs: twenty lists that each hold the last one twice are a million
    nodes, to print as well as to compare. `printable` refuses all but plain data: the rest has no text of its own.
    """
    nodes = characters = depth = 0
    level: list[object] = [value]
    while level:
        depth += 1
        below: list[object] = []
        for item in level:
            nodes += 1
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, (list, tuple)):
                below.extend(item)
            elif printable and not (item is None or isinstance(item, (bool, int, float, Undefined))):
                raise LimitError(f"it prints a {type(item).__name__}, which is no text or plain data")
            if nodes + len(below) > _NODES or depth > _DEPTH:
                raise LimitError("it builds a value that is nested too far")
        level = below
    return nodes, characters, depth
