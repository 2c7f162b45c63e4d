"""A follower's side: it runs the steps that rank 0 plans, and decides nothing."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from bankfull.layers.apart import Feeds
from bankfull.parallel.hot import HotExperts
from bankfull.parallel.messages import (
    EraseMessage,
    MasksMessage,
    MovedMessage,
    PlanMessage,
    RankConnection,
    ReplicatedMessage,
    ReplicateMessage,
    SettleMessage,
    masks_of,
    outcome_message,
    step_plan,
)
from bankfull.runtime.device import Device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.mover import Mover


def follow(
    connection: RankConnection, runner: DeviceRunner, tells: bool = False, hot: HotExperts | None = None
) -> None:
    """Run steps until rank 0 ends the connection. `tells`: whether this rank tells rank 0 the results, which then
    chooses no tokens itself. `hot`: this rank's, if experts are to be copied."""
    flying: deque[Any] = deque()
    newest: Any = None
    while (message := connection.from_leader()) is not None:
        if isinstance(message, PlanMessage):
            newest = runner.forward(step_plan(message, runner.rows.sampling.allowed_mask))
            flying.append(newest)
        elif isinstance(message, MasksMessage):
            runner.finish(newest, masks_of(message))
            if tells and newest.plan.work:
                connection.send(outcome_message(newest.values()))
        elif isinstance(message, SettleMessage):
            step = flying.popleft()
            if not runner.chooses and step.plan.work:
                runner.commit(step, message.tokens)
            elif not (tells and step.plan.work):
                step.values()
            if runner.mover is not None:
                tell_moves(connection, runner.mover)
        elif isinstance(message, ReplicateMessage) and hot is not None:
            hot.replicate()
            connection.send(ReplicatedMessage())
        elif isinstance(message, EraseMessage) and runner.mover is not None and runner.mover.erase is not None:
            runner.mover.erase()


def tell_moves(connection: RankConnection, mover: Mover) -> None:
    """Tell rank 0 which transfers have ended here, after each step. Rank 0 goes on with steps as long as it waits for
    any."""
    completed, failed = mover.ended()
    if completed or failed:
        connection.send(MovedMessage(completed, failed, mover.rates.measured()))


class FeedRunner:
    """Runs the feed-forward layers of steps. It keeps nothing of a sequence."""

    def __init__(self, feeds: Feeds, device: Device) -> None:
        self.feeds, self.device = feeds, device

    def run(self, tokens: int) -> None:
        """Run a step of so many tokens."""
        self.device.launch(partial(self.feeds.run, tokens))


def feed(connection: RankConnection, runner: FeedRunner, hot: HotExperts | None = None) -> None:
    """Run steps as `follow` does, on a rank of feed-forward layers."""
    while (message := connection.from_leader()) is not None:
        if isinstance(message, PlanMessage) and message.work:
            runner.run(sum(work.count + work.drafts for work in message.work))
        elif isinstance(message, ReplicateMessage) and hot is not None:
            hot.replicate()
            connection.send(ReplicatedMessage())
