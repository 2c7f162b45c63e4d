"""What the state manager keeps and tells of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bankfull.state.lower_tier import Key
from bankfull.state.prefix import Chain
from bankfull.types import NULL


@dataclass(slots=True)
class SequenceState:
    """The pages and slots of one sequence. `tables[g]` is its page table in group g; entries before the window are
    NULL."""

    chain: Chain
    tables: list[list[int]]
    live: list[int]
    """Per group, the index of the first page that is still held, besides those that a mask keeps."""
    published: list[int]
    """Per group, the number of pages that were published to the prefix cache."""
    covered: int
    """Tokens that the tables of all groups have pages for."""
    border: int
    """Computed tokens from which on there is something new to publish."""
    slot: int = NULL
    """Slot of the recurrent state after the settled tokens."""
    writing: list[tuple[int, ...]] = field(default_factory=list)
    """Recurrent slots that launched steps write, oldest first."""
    mixed: bool = False
    """Whether some of it was computed with weights of an earlier generation: no other sequence gets any of it."""


class Match(NamedTuple):
    """A prefix whose state is in the prefix cache."""

    length: int
    tables: tuple[tuple[int, ...], ...] = ()
    slot: int = NULL
    private: tuple[Key, ...] = ()
    """Keys that only this sequence may use: their content changes when it goes on."""


class Parked(NamedTuple):
    """A sequence without a row whose computed tokens are kept, as cached content. It is lost, and computed again, only
    if memory is short and no lower tier has a copy."""

    computed: int
    private: tuple[Key, ...]
    """Keys of its partial pages and of its recurrent state."""
    slot: Key | None
    """Key of its recurrent state, private or that of a snapshot; None if it has none."""
    step: int
    """The last launched step that may still write beside the computed tokens."""


@dataclass(slots=True)
class Reserved:
    """Places for a step: new page table entries as (group, first index, pages), and slots to write."""

    pages: Sequence[tuple[int, int, tuple[int, ...]]]
    slots: tuple[int, ...]


NOTHING = Reserved((), ())
