"""The replicas that a front routes to, as columns: with a thousand replicas a choice costs a few array operations.

Every replica has a slot. Its meter reports a change by `touch`, and the columns of changed slots are written again
before the next choice. `TableView` is the sequence of candidates for one request. A policy either looks at single
candidates or takes whole columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.prefixes import CachedTokens
from bankfull.fleet.routing import NAMES, Candidate

if TYPE_CHECKING:
    import numpy as np

NOTHING_CACHED = CachedTokens()


class ReplicaTable:
    def __init__(self) -> None:
        self._meters: list[ReplicaMeter | None] = []
        self._free: list[int] = []
        self._columns = {name: array("d") for name in NAMES}
        self._arrays: dict[str, np.ndarray[Any, Any]] | None = None
        """Views of the columns; None before they are first needed, so that a small fleet imports no numpy."""
        self._touched: set[int] = set()
        self._order: tuple[Sequence[int], np.ndarray[Any, Any]] | None = None
        """The slots that were last asked for, also as an array."""

    def add(self, meter: ReplicaMeter) -> int:
        """The slot of one more replica."""
        if self._free:
            slot = self._free.pop()
            self._meters[slot] = meter
        else:
            slot = len(self._meters)
            self._meters.append(meter)
            self._arrays = None  # a column cannot grow while an array shows its memory
            self._columns = {name: array("d", [*column, 0.0]) for name, column in self._columns.items()}
        meter.on_change = lambda: self._touched.add(slot)
        self._touched.add(slot)
        return slot

    def remove(self, slot: int) -> None:
        meter = self._meters[slot]
        assert meter is not None, "a slot is removed once"
        meter.on_change = None
        self._meters[slot] = None
        self._touched.discard(slot)
        self._free.append(slot)

    def view(self, slots: Sequence[int], cached: CachedTokens = NOTHING_CACHED) -> TableView:
        """The candidates in these slots, with the tokens of a prompt that each one holds."""
        return TableView(self, slots, cached)

    def candidate(self, slot: int, cached_tokens: int) -> Candidate:
        meter = self._meters[slot]
        assert meter is not None, "a removed replica is no candidate"
        return meter.candidate(cached_tokens)

    def columns(self, slots: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
        """Name of a figure -> its values for these slots."""
        if self._arrays is None:
            import numpy as np

            self._arrays = {name: np.frombuffer(column) for name, column in self._columns.items()}
        for slot in self._touched:
            meter = self._meters[slot]
            assert meter is not None, "a removed replica is not touched"
            for column, figure in zip(self._columns.values(), meter.figures(), strict=True):
                column[slot] = figure
        self._touched.clear()
        if len(slots) == len(self._meters):
            return self._arrays  # slots are always in their order
        chosen = self.positions(slots)
        return {name: figures[chosen] for name, figures in self._arrays.items()}

    def positions(self, slots: Sequence[int]) -> np.ndarray[Any, Any]:
        import numpy as np

        if self._order is None or self._order[0] is not slots:
            self._order = slots, np.asarray(slots)
        return self._order[1]

    def __len__(self) -> int:
        return len(self._meters)


class TableView(Sequence[Candidate]):
    """The candidates of one request, made only where a policy looks at them one by one."""

    def __init__(self, table: ReplicaTable, slots: Sequence[int], cached: CachedTokens) -> None:
        """`slots` are in ascending order."""
        self._table, self._slots, self._cached = table, slots, cached

    def __len__(self) -> int:
        return len(self._slots)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        slot = self._slots[index]
        return self._table.candidate(slot, self._cached.at(slot))

    def __iter__(self) -> Iterator[Candidate]:
        return (self[i] for i in range(len(self)))

    def cached(self) -> np.ndarray[Any, Any]:
        """Cached tokens of the prompt by candidate."""
        import numpy as np

        held = np.zeros(len(self._table))
        for tokens, mask in self._cached.levels:
            packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
            bits = np.unpackbits(packed, count=min(len(held), 8 * len(packed)), bitorder="little")
            held[: len(bits)][bits != 0] = tokens
        return held if len(self) == len(self._table) else held[self._table.positions(self._slots)]

    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._table.columns(self._slots)
