"""A follower's side: it loads its part of the model, runs the steps that rank 0 plans, and decides nothing."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from bankfull.assembly import assemble, measured_steps
from bankfull.building import build_weights, plan_build
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.models.registry import stages_of
from bankfull.ops import native
from bankfull.parallel.groups import Ranks
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
from bankfull.precision import choose_dtype
from bankfull.quantize.at_load import as_multiplied
from bankfull.runtime.denoised import suited_steps
from bankfull.runtime.device import Device, open_device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.mover import Mover
from bankfull.spread.apart import Feeds
from bankfull.weights.locate import locate
from bankfull.weights.source import open_model


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
        if isinstance(message, PlanMessage) and message.plan.work:
            runner.run(message.plan.tokens)
        elif isinstance(message, ReplicateMessage) and hot is not None:
            hot.replicate()
            connection.send(ReplicatedMessage())


def load_rank(
    name: str, run: RunConfig, sched: SchedConfig, state: StateConfig, max_len: int | None, ranks: Ranks
) -> DeviceRunner:
    """The runner of another rank: the same model, state and steps as rank 0's."""
    device = open_device(run.device)
    assembled = assemble(open_model(locate(name)), run, sched, state, max_len=max_len, device=device, ranks=ranks)
    return assembled.engine.runner


def load_feeds(name: str, run: RunConfig, sched: SchedConfig, max_len: int | None, ranks: Ranks) -> FeedRunner:
    """The runner of a rank of feed-forward layers."""
    device = open_device(run.device)
    files = open_model(locate(name))
    files = as_multiplied(files, run, device, choose_dtype(run.dtype, files, device.kind))
    if run.threads is not None:
        native.set_threads(run.threads)
    whole = plan_build(files, run, device, max_len or 0)
    model = build_weights(files, ranks.build(whole, stages_of(files.config, run.mesh.pp)), device)
    assert ranks.sides is not None
    feeds = Feeds(whole, model, ranks.sides)
    if device.kind != "cpu":  # the ranks with mixers measure the memory of these steps
        for size in measured_steps(suited_steps(model, sched.suited(**device.suits), sched.step_tokens, max_len)):
            device.peak(partial(feeds.run, sum(size)))
    return FeedRunner(feeds, device)
