"""The contract between the engine's loop and the code that runs its steps.

`DeviceRunner` computes on a CPU or a GPU. The planner's simulator and the tests' fake device implement the same two
calls, so that the loop, the scheduler and the state manager are the real ones everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

import numpy as np

from bankfull.ranks.mesh import MeshSpec
from bankfull.runtime.device import Future
from bankfull.types import StepPlan, StepResult

Launched = TypeVar("Launched", bound=Future[StepResult])


class Runner(Protocol[Launched]):
    """Runs planned steps in order. Neither call waits for the device."""

    def forward(self, plan: StepPlan) -> Launched:
        """Enqueue the model's part of the step. `Launched.wait()` gives the step's result after `finish`."""
        ...

    def finish(self, step: Launched, masks: Mapping[int, np.ndarray], /) -> None:
        """Enqueue the choice of tokens. `masks`: row -> packed bitmask of the tokens that its grammar allows, or one
        for each line of the row (its last known token and its drafts). The engine knows it only after the previous step
        has settled. Called once per step, in the order of `forward`."""
        ...


class StepFollowers(Protocol):
    """Other ranks that run each step of this runner, in the same order."""

    mesh: MeshSpec

    def forward(self, plan: StepPlan) -> None: ...
    def finish(self, masks: Mapping[int, np.ndarray]) -> None: ...
    def settle(self, tokens: list[list[int]]) -> None:
        """The oldest step in flight is waited for. `tokens`: its results, for ranks that do not choose them."""

    def outcome(self) -> StepResult:
        """The result of the oldest step in flight, from the rank that chooses its tokens."""

    def wait_lost(self) -> str:
        """Until one of them has ended; one sentence."""
