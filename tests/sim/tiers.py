"""Simulated tiers below the device: they answer late, fail, lose content, and copy while steps run."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from bankfull.types import NULL, Tier, Transfer
from tests.sim.promises import demand

if TYPE_CHECKING:
    from tests.sim.device import Device

Place = tuple[Tier, bool, int]
"""Tier, whether it is a slot, number."""


class LowerTiers:
    def __init__(self, random: Random, fails: float, late: float) -> None:
        """`fails`: how often a transfer fails. `late`: how often it does not end in a step."""
        self.random, self.fails, self.late = random, fails, late
        self.content: dict[Place, Any] = {}
        self.under_way: dict[int, tuple[Transfer, Any]] = {}
        """With the content at the start."""

    def start(self, device: Device, transfer: Transfer) -> None:
        for tier, place in (transfer.src, transfer.dst):
            demand(place != NULL, f"a transfer to or from place 0 of {tier.name}")
        demand(transfer.src.tier != transfer.dst.tier, "a transfer within a lower tier")
        for other, _ in self.under_way.values():
            if other.slot == transfer.slot:
                demand(transfer.dst not in (other.src, other.dst), f"two transfers at {transfer.dst}")
                demand(transfer.src != other.dst, f"a transfer reads {transfer.src} before it is filled")
        content = self._read(device, transfer)
        demand(content is not None, f"a transfer reads {transfer.src}, which holds nothing")
        ends = (transfer.src, transfer.dst)
        pinned = [place for tier, place in ends if tier == Tier.DEVICE]
        device.moving[transfer.id] = tuple(-place if transfer.slot else place for place in pinned)
        self.under_way[transfer.id] = (transfer, content)

    def filled(self) -> set[int]:
        """Places of the device that transfers fill; slots are negative."""
        return {
            -transfer.dst.place if transfer.slot else transfer.dst.place
            for transfer, _ in self.under_way.values()
            if transfer.dst.tier == Tier.DEVICE
        }

    def end(self, device: Device, failed: list[int]) -> list[int]:
        """Some transfers end; the completed ones. A copy may happen at any time until then."""
        completed = []
        for number, (transfer, begun) in list(self.under_way.items()):
            if self.random.random() < self.late:
                continue
            del self.under_way[number], device.moving[number]
            if self.random.random() < self.fails:
                failed.append(number)
                self._write(device, transfer, None)
                continue
            self._write(device, transfer, self._torn(begun, self._read(device, transfer)))
            completed.append(number)
        return completed

    def _torn(self, begun: Any, ended: Any) -> Any:
        """Each token as it was at the start or at the end."""
        if not isinstance(begun, tuple) or ended is None:
            return begun
        (group, first), (_, second) = begun, ended
        return group, [self.random.choice(pair) for pair in zip(first, second, strict=True)]

    def _read(self, device: Device, transfer: Transfer) -> Any:
        tier, place = transfer.src
        if tier != Tier.DEVICE:
            found = self.content.get((tier, transfer.slot, place))
        else:
            found = device.slots.get(place) if transfer.slot else device.pages.get(place)
        return (found[0], list(found[1])) if isinstance(found, tuple) else found

    def _write(self, device: Device, transfer: Transfer, content: Any) -> None:
        tier, place = transfer.dst
        if tier != Tier.DEVICE:
            self.content[tier, transfer.slot, place] = content
        elif transfer.slot:
            device.slots[place] = content
        elif content is None:
            device.pages.pop(place, None)
        else:
            device.pages[place] = content
