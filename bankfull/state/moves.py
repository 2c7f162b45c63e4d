"""Transfers that are under way: what they pin, and what follows when they have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bankfull.types import TierAddress, Transfer

Ended = Callable[[bool], None]
"""Called once when a transfer has ended, with whether it succeeded."""


@dataclass(frozen=True, slots=True)
class Move:
    transfer: Transfer
    ended: Ended


class Moves:
    """The ids of one state manager's transfers. Whoever starts one pins both of its ends, and releases them in
    `ended`."""

    def __init__(self) -> None:
        self.under_way: dict[int, Move] = {}
        """Transfers whose end was not reported yet, by id."""
        self._planned: list[Transfer] = []
        self._count = 0

    def start(
        self, src: TierAddress, dst: TierAddress, ended: Ended, *, slot: bool = False, key: bytes = b""
    ) -> Transfer:
        """The next plan carries the transfer."""
        transfer = Transfer(self._count, src, dst, slot, key)
        self._count += 1
        self.under_way[transfer.id] = Move(transfer, ended)
        self._planned.append(transfer)
        return transfer

    def take_planned(self) -> list[Transfer]:
        """Transfers that no plan carries yet."""
        planned, self._planned = self._planned, []
        return planned

    def cancel(self, unwanted: Callable[[Transfer], bool]) -> None:
        """End those that no plan carries yet, without success."""
        dropped = [transfer.id for transfer in self._planned if unwanted(transfer)]
        self._planned = [transfer for transfer in self._planned if transfer.id not in dropped]
        self.settle((), dropped)

    def settle(self, completed: Iterable[int], failed: Iterable[int] = ()) -> None:
        """Transfers have ended, with or without success."""
        for succeeded, ids in ((True, completed), (False, failed)):
            for number in ids:
                # Some are reported twice: with the step that was given up, and when they end.
                if (move := self.under_way.pop(number, None)) is not None:
                    move.ended(succeeded)

    @property
    def planned(self) -> bool:
        return bool(self._planned)

    def __len__(self) -> int:
        """Transfers whose end was not reported yet."""
        return len(self.under_way)
