"""The minimum work of an operation: the single source of every "% of limit" that we show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and memory traffic of one call with each operand moved once: a lower bound, not a measurement."""

    flops: float = 0.0
    read: float = 0.0
    write: float = 0.0

    @property
    def bytes(self) -> float:
        return self.read + self.write

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte; infinite for work without memory traffic."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.write + other.write)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flops * times, self.read * times, self.write * times)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Roofline bound: the shortest time on a machine with these ceilings."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def nbytes(*operands: Any) -> int:
    """Total size of tensors and quantized tensors in bytes; None counts as 0."""
    total = 0
    for operand in operands:
        if operand is None:
            continue
        size = getattr(operand, "nbytes", None)
        total += operand.numel() * operand.element_size() if size is None else int(size)
    return total
