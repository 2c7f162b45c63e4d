"""A follower's side: it runs the steps that rank 0 plans, and decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from bankfull.parallel.messages import (
    MasksMessage,
    PlanMessage,
    RankConnection,
    SettleMessage,
    masks_of,
    outcome_message,
    step_plan,
)
from bankfull.runtime.device_runner import DeviceRunner


def follow(connection: RankConnection, runner: DeviceRunner, tells: bool = False) -> None:
    """Run steps until rank 0 ends the connection. `tells`: whether this rank tells rank 0 the results, which then
    chooses no tokens itself."""
    flying: deque[Any] = deque()
    newest: Any = None
    while (message := connection.from_leader()) is not None:
        if isinstance(message, PlanMessage):
            newest = runner.forward(step_plan(message, runner.rows.sampling.allowed_mask))
            flying.append(newest)
        elif isinstance(message, MasksMessage):
            runner.finish(newest, masks_of(message))
            if tells and newest.plan.work:
                connection.send(outcome_message(newest.wait()))
        elif isinstance(message, SettleMessage):
            step = flying.popleft()
            if not runner.chooses and step.plan.work:
                runner.commit(step, message.tokens)
            elif not (tells and step.plan.work):
                step.wait()


def feed(connection: RankConnection, run: Callable[[int], object]) -> None:
    """As `follow`, on a rank of feed-forward layers, which keeps nothing of a sequence. `run`: runs these layers for a
    step of so many tokens."""
    while (message := connection.from_leader()) is not None:
        if isinstance(message, PlanMessage) and message.work:
            run(sum(work.count + work.drafts for work in message.work))
