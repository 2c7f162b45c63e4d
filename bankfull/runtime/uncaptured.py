"""The notice for a CPU step that cannot be captured: the expression that prevents it, and its measured cost."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from bankfull.ops import add
from bankfull.ops.native.tape.record import CannotRecord
from bankfull.ops.ranks.collectives import COLLECTIVES
from bankfull.ops.registry import BODY, Kit, Operation
from bankfull.runtime.batch import placed_batch
from bankfull.runtime.forward import Eager
from bankfull.state.storage import Storage

RUNS, MOST_SECONDS = 10, 0.5
"""Measured steps, and the time after which no further one begins."""


def notice_of(problem: CannotRecord, forward: Eager, kit: Kit) -> str:
    """What logs and commands say of it: first for users, then the place in the source for developers, who can make it a
    registered operation."""
    cost = ""
    if not any(operation.name in kit.chosen for operation in COLLECTIVES):
        # Ranks would have to run equally many steps to measure it, and some of them may be able to record theirs.
        cost = f"; expect about {overhead(forward, kit):.0%} more time per decode step (measured now)"
    return (
        f"Steps run without capture: this model computes something beside the engine's operations{cost}. Tokens are "
        f"the same. For a report: {problem.where}, because {problem}."
    )


class KernelTimer:
    """Runs each operation and sums up the time inside its provider."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def add(self, operation: Operation, provider: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = operation.body if provider == BODY else operation.providers[provider].run
        begun = perf_counter()
        result = run(*args, **kwargs)
        self.seconds += perf_counter() - begun
        self.calls += 1
        return result


def overhead(forward: Eager, kit: Kit) -> float:
    """The share by which a step of one token takes longer than its kernels alone, which is all that a captured step
    runs. The cost of a call into a kernel is taken from the smallest one. Fused kernels would save more."""
    step = _one_token(forward)
    with torch.inference_mode():
        smallest = _smallest()
        step()  # the first run lays out what is laid out once
        call = min(_timed(smallest) for _ in range(RUNS))
        whole = kernels = float("inf")
        until = perf_counter() + MOST_SECONDS
        for _ in range(RUNS):
            timer = KernelTimer()
            whole = min(whole, _timed(step))
            with kit.recording(timer):
                step()
            kernels = min(kernels, timer.seconds - timer.calls * call)
            if perf_counter() > until:
                break
    return max(0.0, whole / max(kernels, 1e-9) - 1)


def _one_token(forward: Eager) -> Any:
    """A step of one sequence's first token, in a state of its own."""
    layout, device = forward.layout, torch.device("cpu")
    storage = Storage(layout, 0, 1, device)
    storage.frames.zero_()
    eager = Eager(forward.model, layout, storage.layers)
    first, second = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.long)
    slots = None if layout.recurrent is None else (first, second)
    batch = placed_batch(layout, [1], [0], first, [first[None]] * len(layout.paged), slots)
    return lambda: forward.model.head.best(eager(batch))


def _smallest() -> Any:
    run, x = add.providers["native"].run, torch.zeros(1, 8)
    return lambda: run(x, x)


def _timed(work: Any) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun
