"""A device that only models time: the `Runner` of simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bankfull.types import StepPlan, StepResult, Work

StepSeconds = Callable[[Sequence[Work]], float]
Tokens = Callable[[int, int], int]
"""(request number, position) -> the sampled token."""


def some_token(request: int, position: int) -> int:
    """Different for each request, so that no two outputs share pages."""
    return (request * 1_000_003 + position * 7919) & 0x7FFFFFFF


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class FakeStep:
    """A future of a step's result. Waiting for it moves the clock to the step's end."""

    plan: StepPlan
    clock: Clock
    ends: float
    """Seconds on the clock."""
    tokens: list[list[int]]

    def wait(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.ends)
        completed = [transfer.id for transfer in self.plan.transfers]
        return StepResult(self.plan.step, self.tokens, completed=completed)


class FakeRunner:
    """A `Runner` that only models time. A step begins when the device is free, and ends after its seconds.

    `token`: None if no one reads what is sampled. `fixed`: masked tokens that a denoising step of a diffusion model
    fixes; a block is complete when none is left."""

    def __init__(self, clock: Clock, seconds: StepSeconds, token: Tokens | None = some_token, fixed: int = 1) -> None:
        self._clock, self._seconds, self._token, self._fixed = clock, seconds, token, fixed
        self.free_at = 0.0
        """The end of the last launched step."""
        self._request: dict[int, Any] = {}
        """Per row: the request number."""
        self._masked: dict[int, int] = {}
        """Per row: masked tokens of the block that is being denoised."""

    def forward(self, plan: StepPlan) -> FakeStep:
        for enter in plan.enter:
            self._request[enter.row] = enter.request
            self._masked.pop(enter.row, None)
        seconds = self._seconds(plan.work) if plan.work else 0.0
        self.free_at = max(self._clock.now, self.free_at) + seconds
        # The tokens are fixed at launch: another sequence may enter a row before the step settles.
        tokens = [self._next(w) if w.sample else [] for w in plan.work]
        return FakeStep(plan, self._clock, self.free_at, tokens)

    def finish(self, step: FakeStep, masks: Mapping[int, Any]) -> None:
        """The tokens are known already."""

    def decode(self, row: int, known: int, count: int) -> list[int]:
        """The next tokens of a row that has `known` ones."""
        if self._token is None:
            return [0] * count
        return [self._token(self._request[row], known + i) for i in range(count)]

    def _next(self, work: Work) -> list[int]:
        row, known = work.row, work.start + work.count
        if not work.block:
            return self.decode(row, known, 1)
        left = self._masked.pop(row, work.block) - self._fixed
        if left > 0:
            self._masked[row] = left
            return []
        return self.decode(row, known, work.block)
