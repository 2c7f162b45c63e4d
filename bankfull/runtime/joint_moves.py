"""Transfers of several ranks: each rank moves its own part of a page, and rank 0 learns when all of them have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bankfull.state.transfer_rates import TransferRates
from bankfull.types import Tier


@dataclass(frozen=True, slots=True)
class RankMoves:
    """What a rank reports."""

    rank: int
    completed: Sequence[int]
    failed: Sequence[int]
    rates: Sequence[tuple[Tier, Tier, float]]
    """All that it has measured so far, in bytes per second of whole pages."""


class MoveReports(Protocol):
    """Hears the other ranks."""

    def reports(self, seconds: float) -> list[RankMoves]: ...


class JointMoves:
    """What rank 0 knows of the transfers of all ranks. A transfer has ended when it has ended on every rank: until then
    one of them may read or write its places. It has succeeded if it has on every rank: a page without one of its parts
    is lost."""

    def __init__(self, others: MoveReports, count: int, rates: TransferRates) -> None:
        """`count`: the number of the other ranks that keep state."""
        self._others, self._count, self._rates = others, count, rates
        self._left: dict[int, int] = {}
        """Transfer -> ranks on which it has not ended."""
        self._failed: set[int] = set()
        self._completed_now: list[int] = []
        self._failed_now: list[int] = []

    def begin(self, transfer: int) -> None:
        self._left[transfer] = 1 + self._count

    def ended(self, completed: Sequence[int], failed: Sequence[int]) -> tuple[list[int], list[int]]:
        """The transfers that have ended on all ranks since the last call. `completed`, `failed`: those of this one."""
        self._count_down(completed, failed)
        if self._left:
            self.wait(0)
        ended = self._completed_now, self._failed_now
        self._completed_now, self._failed_now = [], []
        return ended

    def wait(self, seconds: float) -> None:
        """Until another rank reports something, at most this long."""
        for report in self._others.reports(seconds):
            self._rates.hear(report.rank, report.rates)
            self._count_down(report.completed, report.failed)

    def _count_down(self, completed: Sequence[int], failed: Sequence[int]) -> None:
        self._failed.update(failed)
        for transfer in (*completed, *failed):
            self._left[transfer] -= 1
            if self._left[transfer]:
                continue
            del self._left[transfer]
            if transfer in self._failed:
                self._failed.remove(transfer)
                self._failed_now.append(transfer)
            else:
                self._completed_now.append(transfer)
