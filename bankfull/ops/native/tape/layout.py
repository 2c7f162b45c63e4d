"""Places of intermediate results: values that are never live at the same time share their bytes."""

from __future__ import annotations

from collections.abc import Collection

from bankfull.ops.native.tape.instruction import Node, Value, values_in

ALIGN = 64
"""Alignment of places in bytes per token: whole cache lines, for any number of tokens."""


def lay_out(nodes: list[Node], keep: Collection[Value]) -> int:
    """Place every value; returns the arena's bytes per token. Values in `keep` stay live after the last instruction."""
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    for at, node in enumerate(nodes):
        for value in values_in([*node.writes.values(), *node.reads.values()]):
            first.setdefault(value, at)
            last[value] = at
    last |= dict.fromkeys(keep, len(nodes))
    order = sorted(first, key=lambda value: first[value])
    ends: dict[int, list[Value]] = {}
    for value in order:
        ends.setdefault(last[value], []).append(value)
    taken: list[tuple[int, int]] = []
    size = 0
    next_end = 0
    for value in order:
        while next_end < first[value]:  # values whose last use is before this one's first
            for done in ends.get(next_end, []):
                taken.remove((done.place, done.place + _bytes(done)))
            next_end += 1
        value.place = _gap(taken, _bytes(value))
        taken.append((value.place, value.place + _bytes(value)))
        taken.sort()
        size = max(size, value.place + _bytes(value))
    return size


def _bytes(value: Value) -> int:
    return -(-value.row_bytes // ALIGN) * ALIGN


def _gap(taken: list[tuple[int, int]], size: int) -> int:
    """The lowest offset with `size` free bytes; `taken` is sorted and does not overlap."""
    place = 0
    for begin, end in taken:
        if begin - place >= size:
            break
        place = max(place, end)
    return place
