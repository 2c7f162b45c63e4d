"""What an operation must do at the very least: the one source of truth for every "% of limit" that we show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """Arithmetic and memory traffic of one call, each operand moved once: a lower bound, not a measurement."""

    flops: float = 0.0
    read: float = 0.0
    write: float = 0.0

    @property
    def bytes(self) -> float:
        return self.read + self.write

    @property
    def intensity(self) -> float:
        """Operations per byte; infinite for work that touches no memory."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.write + other.write)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.flops * times, self.read * times, self.write * times)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The shortest time that a machine with these ceilings can take (FACTS: the roofline)."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def nbytes(*operands: Any) -> int:
    """The bytes of tensors and quantized tensors; None counts nothing."""
    total = 0
    for operand in operands:
        if operand is None:
            continue
        size = getattr(operand, "nbytes", None)
        total += operand.numel() * operand.element_size() if size is None else int(size)
    return total
