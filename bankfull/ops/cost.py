"""The minimum work of an operation: the single source of every "% of limit" that we show."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

Operands = Literal["own", "bf16", "int8", "fp8"]
"""Operands of multiplications: in the computation's dtype, or rounded to a narrower type. A kernel may use a wider one
for rounded operands."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Arithmetic rates in FLOP/s by operands; infinite where none is known."""

    own: float
    bf16: float
    int8: float
    fp8: float

    @staticmethod
    def flat(rate: float) -> Rates:
        """One rate for all operands."""
        return Rates(rate, rate, rate, rate)


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and memory traffic of one call with each operand moved once: a lower bound, not a measurement."""

    flops: float = 0.0
    read: float = 0.0
    write: float = 0.0
    bf16: float = 0.0
    """FLOPs with operands rounded to bfloat16, and below with others; all are part of `flops`."""
    int8: float = 0.0
    fp8: float = 0.0
    wire: float = 0.0
    """Bytes that leave the rank for others of its group."""

    @property
    def bytes(self) -> float:
        return self.read + self.write

    @property
    def own(self) -> float:
        """FLOPs in the computation's dtype."""
        return self.flops - self.bf16 - self.int8 - self.fp8

    @property
    def operands(self) -> list[Operands]:
        """Operands that the FLOPs have, those with the most FLOPs first. Those of less than a millionth do not count:
        fitted costs have rounding errors."""
        kinds: list[Operands] = ["own", "bf16", "int8", "fp8"]
        used = [kind for kind in kinds if getattr(self, kind) > 1e-6 * self.flops]
        return sorted(used, key=lambda kind: -getattr(self, kind))

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte; infinite for work without memory traffic."""
        return self.flops / self.bytes if self.bytes else float("inf")

    def on(self, operands: Operands) -> Cost:
        """The same with all FLOPs on these operands."""
        return replace(self, **{"bf16": 0.0, "int8": 0.0, "fp8": 0.0, **_all_on(operands, self.flops)})

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(one + two for one, two in zip(self.vector, other.vector, strict=True)))

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1.0

    def __mul__(self, times: float) -> Cost:
        return Cost(*(number * times for number in self.vector))

    @property
    def vector(self) -> tuple[float, ...]:
        """The fields in order, for linear algebra."""
        return self.flops, self.read, self.write, self.bf16, self.int8, self.fp8, self.wire

    def arithmetic(self, rates: Rates) -> float:
        """Seconds of the arithmetic alone; 0 if the rate of one of its operands is not known."""
        if not all(map(math.isfinite, (rates.own, rates.bf16, rates.int8, rates.fp8))) and any(
            math.isinf(getattr(rates, kind)) for kind in self.operands
        ):
            return 0.0
        if not (self.bf16 or self.int8 or self.fp8):
            return self.flops / rates.own
        return self.own / rates.own + self.bf16 / rates.bf16 + self.int8 / rates.int8 + self.fp8 / rates.fp8

    def peak(self, rates: Rates) -> float:
        """The highest FLOP/s of its mix of operands; infinite if it is not known."""
        kinds = self.operands
        if len(kinds) == 1:
            return float(getattr(rates, kinds[0]))
        seconds = self.arithmetic(rates)
        return self.flops / seconds if seconds else math.inf

    def seconds(self, rates: Rates, bytes_per_second: float) -> float:
        """Roofline bound: the shortest time on a machine with these ceilings."""
        return max(self.arithmetic(rates), self.bytes / bytes_per_second)


NUMBERS = len(fields(Cost))
"""Length of `Cost.vector`."""


def seconds_per_number(rates: Rates) -> tuple[float, ...]:
    """Factors by which the numbers of a cost add up to the seconds of its arithmetic."""
    own = 1 / rates.own
    return own, 0.0, 0.0, 1 / rates.bf16 - own, 1 / rates.int8 - own, 1 / rates.fp8 - own, 0.0


def _all_on(operands: Operands, flops: float) -> dict[str, float]:
    return {} if operands == "own" else {operands: flops}


def rounded_to(operands: Operands, cost: Callable[..., Cost]) -> Callable[..., Cost]:
    """The cost function of an operation that rounds the operands of its products."""
    return lambda *args, **kwargs: cost(*args, **kwargs).on(operands)


def nbytes(*operands: Any) -> int:
    """Total size of tensors and quantized tensors in bytes; None counts as 0."""
    total = 0
    for operand in operands:
        if operand is None:
            continue
        size = getattr(operand, "nbytes", None)
        total += operand.numel() * operand.element_size() if size is None else int(size)
    return total
