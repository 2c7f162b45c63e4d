"""Autotuning of a model's linear layers: times every candidate kernel plan on every shape of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.ops import linear
from bankfull.ops.meter import Meter
from bankfull.ops.products.triton.table import Entry
from bankfull.ops.registry import Function, Operation
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import ModelFiles

CACHES = 3
"""Total size of the rotating weight copies in device caches, so that weights are read from memory as in a model."""
TURNS = 7
WRONG = 2e-2
"""Relative error above which a plan is rejected as wrong."""


class Linears(Protocol):
    """The plans with which a device can compute a dense linear layer."""

    CANDIDATES: Sequence[Any]

    def heuristic(self, rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> Any: ...

    def run_plan(self, plan: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """The fastest plan of a shape, and the plan used without a tuning table."""

    entry: Entry
    seconds: float
    usual: str
    usual_seconds: float
    """Infinite if the usual plan does not run."""
    bytes: int
    """Bytes of weights and activations, moved once."""

    @property
    def gain(self) -> float:
        return self.usual_seconds / self.seconds


class ShapeMeter(Meter):
    """A meter that records the shapes of dense weights, stacked as on a GPU."""

    stacks = True

    def __init__(self) -> None:
        Meter.__init__(self)
        self.seen: dict[tuple[int, int], int] = {}

    def bind(self, operation: Operation, **facts: Any) -> Function:
        run = Meter.bind(self, operation, **facts)

        def recording(*args: Any, **kwargs: Any) -> Any:
            if operation is linear and isinstance(args[1], QTensor) and args[1].is_dense:
                outer, inner = args[1].shape
                self.seen[outer, inner] = self.seen.get((outer, inner), 0) + 1
            return run(*args, **kwargs)

        return recording


def shapes_of(files: ModelFiles, dtype: str | None = None) -> list[tuple[int, int]]:
    """(outputs, inputs) of the model's dense linear layers including the head, most weights first."""
    meter = ShapeMeter()
    MeteredModel(files, dtype=dtype, meter=meter).cost(StepShape.decode(2, 8))
    return sorted(meter.seen, key=lambda shape: -shape[0] * shape[1] * meter.seen[shape])


Timer = Callable[[Callable[[int], Tensor], int], float]
"""timer(work, copies): seconds per call of `work(copy)`, averaged over the copies."""


def timed_in_a_graph(work: Callable[[int], Tensor], copies: int) -> float:
    """Time all copies as one CUDA graph, so that launches cost the same as in a captured step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy in range(copies):
            work(copy)  # compiles, and creates one-time layouts
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for copy in range(copies):
                work(copy)
        best = inf
        for _ in range(TURNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
    return best / copies


def timings_of(
    shapes: Sequence[tuple[int, int]],
    rows: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    linears: Linears,
    timer: Timer,
    cache_bytes: int,
) -> Iterator[ShapeTiming | None]:
    """One per shape and number of rows, in order; None if no plan runs."""
    for outer, inner in shapes:
        size = outer * inner * dtype.itemsize
        copies = max(2, -(-CACHES * cache_bytes // size))
        weights = [torch.randn(outer, inner, device=device).mul_(inner**-0.5).to(dtype) for _ in range(copies)]
        for count in rows:
            x = torch.randn(count, inner, device=device).to(dtype)
            yield _fastest(linears, x, weights, timer)
        del weights


def _fastest(linears: Linears, x: Tensor, weights: Sequence[Tensor], timer: Timer) -> ShapeTiming | None:
    (rows, inner), outer = x.shape, weights[0].shape[0]
    wanted = torch.nn.functional.linear(x, weights[0]).double()
    usual: str = linears.heuristic(rows, outer, inner, x.dtype, x.device).name
    taken: dict[str, float] = {}
    for plan in linears.CANDIDATES:
        seconds = _seconds(linears, plan, x, weights, wanted, timer)
        if seconds is not None:
            taken[plan.name] = seconds
    if not taken:
        return None
    best = min(taken, key=lambda name: taken[name])
    moved = (outer * inner + rows * (outer + inner)) * x.element_size()
    entry = Entry(rows, outer, inner, str(x.dtype).removeprefix("torch."), best)
    return ShapeTiming(entry, taken[best], usual, taken.get(usual, inf), moved)


def _seconds(
    linears: Linears, plan: Any, x: Tensor, weights: Sequence[Tensor], wanted: Tensor, timer: Timer
) -> float | None:
    """None if the plan does not support this shape or computes it wrongly."""
    try:
        got = linears.run_plan(plan, x, weights[0], None).double()
        if not float((got - wanted).norm()) <= WRONG * float(wanted.norm()):
            return None
        return timer(lambda copy: linears.run_plan(plan, x, weights[copy], None), len(weights))
    except (RuntimeError, ValueError, AssertionError):
        return None
