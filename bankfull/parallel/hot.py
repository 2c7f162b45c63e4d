"""Hot experts: each rank counts the tokens of its experts in the first steps; then every rank holds those used most."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.errors import ConfigError
from bankfull.ranks.expert_ranks import SpreadLayer
from bankfull.runtime.device import Device
from bankfull.types import StepPlan

COUNTED_TOKENS = 4096
"""Tokens of the steps after which rank 0 decides: enough to tell hot experts from others, and soon reached."""


def bytes_of_copies(layers: Sequence[SpreadLayer], hot: int, ranks: int) -> int:
    """The most bytes that a rank needs beside its weights: for the copies, and for a layer that is read again while the
    old one is there. `ranks`: those over which experts are spread."""
    again = (layer.expert_bytes * -(-layer.expert_count // ranks) for layer in layers)
    return sum(hot * layer.expert_bytes for layer in layers) + max(again, default=0)


class HotExperts:
    """The experts of one rank. All ranks replicate between the same two steps, when rank 0 tells them to."""

    def __init__(self, layers: Sequence[SpreadLayer], hot: int, device: Device) -> None:
        """`hot`: copies in each layer."""
        self._layers, self._hot, self._device = layers, hot, device
        for layer in layers:
            if hot >= layer.expert_count:
                raise ConfigError(
                    f"The layout copies hot={hot} experts of each layer to every rank, but a layer has only "
                    f"{layer.expert_count}; use hot={layer.expert_count - 1} or less."
                )
            layer.count_routing()
        self._seen = 0

    def due(self, plan: StepPlan) -> bool:
        """Asked once before each step, by rank 0: whether to replicate now."""
        before = self._seen
        self._seen += sum(work.count + work.drafts for work in plan.work)
        return before >= COUNTED_TOKENS

    def replicate(self) -> None:
        self._device.launch(self._replicate).wait()

    def _replicate(self) -> None:
        for layer in self._layers:
            layer.replicate(layer.counted_routing(), self._hot)
