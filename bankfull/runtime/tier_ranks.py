"""The ranks of a replica that keep state, as their tiers see them: each has its own part of every page."""

from __future__ import annotations

import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bankfull.runtime.host import available_memory
from bankfull.state.disk import DiskStore, PlaceEntry
from bankfull.state.disk_folders import NAMING_BYTES, DiskUnusable, folder_name
from bankfull.state.spec import Layout


class TierRanks(Protocol):
    """`parallel.groups.Ranks`. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This one; rank 0 plans."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What a rank's part of a page depends on: it names the files of the disk tier."""
        ...

    def gather(self, numbers: Sequence[int]) -> Tensor:
        """The numbers of each rank, as its row."""
        ...


class Alone:
    """The only rank."""

    rank = 0

    @property
    def facts(self) -> dict[str, Any]:
        return {}

    def gather(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor([list(numbers)])


@dataclass(frozen=True, slots=True)
class PlaceSizes:
    """Bytes of a page and of a slot."""

    whole: tuple[int, int]
    """Bytes over all ranks."""
    here: tuple[int, int]
    """Bytes over the ranks of this machine."""
    free: int
    """Bytes of memory that are free on this machine."""
    first: bool
    """Whether this rank is the first one of its machine."""
    ranks: int = 1

    @staticmethod
    def of(layout: Layout, ranks: TierRanks) -> PlaceSizes:
        machine = zlib.crc32(platform.node().encode())
        table = ranks.gather((layout.frame_bytes, slot_bytes(layout), available_memory(), machine, ranks.rank))
        near = table[table[:, 3] == machine]

        def total(rows: Tensor) -> tuple[int, int]:
            return int(rows[:, 0].sum()), int(rows[:, 1].sum())

        first = int(near[:, 4].min()) == ranks.rank
        return PlaceSizes(total(table), total(near), int(near[:, 2].min()), first, len(table))

    def bytes_here(self, pages: int, slots: int) -> int:
        return pages * self.here[0] + slots * self.here[1]


def slot_bytes(layout: Layout) -> int:
    return layout.recurrent.slot_bytes if layout.recurrent else 0


def common_number(ranks: TierRanks, own: int | None) -> int:
    """The number of rank 0's directory, which only rank 0 knows: directories of one replica belong together."""
    return int(ranks.gather([-1 if own is None else own]).max())


def agree(ranks: TierRanks, problem: DiskUnusable | None) -> None:
    """Go on if the disk tier can be used on every rank; else raise, on all of them."""
    if problem is not None:
        ranks.gather([1])
        raise problem
    without = ranks.gather([0])[:, 0].nonzero().flatten().tolist()
    if without:
        brief = f"rank {without[0]} cannot use its part of it"
        raise DiskUnusable(f"The disk tier cannot be used: {brief}, and its own message says why.", brief)


def directories(ranks: TierRanks, root: Path, identity: bytes, store: DiskStore) -> tuple[set[Path], int]:
    """The directories of all ranks, as if they were below `root`, and the bytes that are held in them."""
    held = sum(len(file.entries()) * file.place_bytes for file in store.files.values())
    half = NAMING_BYTES // 2
    naming = (int.from_bytes(identity[first : first + half]) for first in (0, half))
    rows = ranks.gather((*naming, store.number, held)).tolist()
    paths = {root / folder_name(a.to_bytes(half) + b.to_bytes(half), number) for a, b, number, _ in rows}
    return paths, sum(row[3] for row in rows)


def held_by_all(ranks: TierRanks, entries: Sequence[PlaceEntry], places: int) -> list[PlaceEntry]:
    """The entries of this rank that every rank has in the same place. A rank that was killed while it wrote, or whose
    files were deleted, has others; a page without one of its parts is worth nothing."""
    if isinstance(ranks, Alone):
        return list(entries)
    # A digest that is equal by chance does no harm: a rank reads a place only under the key that it holds.
    digests = [0] * (places + 1)
    for entry in entries:
        digests[entry.place] = int.from_bytes(blake2b(entry.key, digest_size=8).digest(), signed=True)
    table = ranks.gather(digests)
    same = (table == table[0]).all(0).tolist()
    return [entry for entry in entries if same[entry.place]]
