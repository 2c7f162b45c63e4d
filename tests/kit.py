"""An engine without text, for tests: tokens in, tokens out, with hands on everything inside."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import bankfull.loading
from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.adaptive import AdaptiveWidth
from bankfull.decode.drafting import Drafting
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify
from bankfull.engine import Engine
from bankfull.layers.decoder import Decoder
from bankfull.ops import Kit
from bankfull.runtime.device import Cpu, Cuda, Device, open_device
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.mover import HostPlaces, Mover
from bankfull.runtime.rows import Job
from bankfull.sample.params import SamplingParams
from bankfull.sched.canvas import Canvas
from bankfull.sched.scheduler import Scheduler
from bankfull.spread.decoder import RankDecoder
from bankfull.state.disk import DiskStore
from bankfull.state.lower_tier import LowerTier
from bankfull.state.manager import StateManager
from bankfull.state.spec import joined_states, layout_of
from bankfull.state.tiers import Tiers
from bankfull.state.transfer_rates import TransferRates
from bankfull.types import Output, Request, Tier
from tests.late import Late
from tests.tiny import DEVICE

GREEDY = SamplingParams(temperature=0.0)
LONG = 96
"""Tokens of a long sequence."""


@dataclass
class Bench:
    """An engine over a tiny model. Free pages and slots are poisoned after every step: a stale read gives NaN."""

    model: Decoder
    device: Device
    depth: int
    sched: SchedConfig = field(default_factory=SchedConfig)
    state: StateConfig = field(default_factory=StateConfig)
    strategy: Strategy = field(default_factory=Plain)
    frames: int = 400
    max_len: int = 128
    kit: Kit | None = None
    """With it, steps are captured where the device can."""
    lookup: GuessLookup | None = None
    """Finds drafts on the host, beside the strategy."""
    adaptive: AdaptiveWidth | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None
    tiers: str = ""
    """Tiers below the device: host, disk, both. The device then has pages for two long sequences."""

    def __post_init__(self) -> None:
        self.strategy.prepare(self.model)
        states = joined_states(self.model.states(), self.strategy.states())
        layout = layout_of(states, self.state.page_tokens)
        if isinstance(self.model, RankDecoder) and self.model.all_states is not None:
            layout = layout.held(self.model.first, self.model.first + len(self.model.blocks))
        if self.tiers:
            self.frames = 2 * layout.frames_for(LONG, self.sched.step_tokens)
        lookup = self.strategy if isinstance(self.strategy, GuessLookup) else self.lookup
        guesses = 0 if lookup is None else lookup.most
        width = max(self.strategy.width(0), guesses)
        slots = (2 + self.depth) * (1 + width) * self.sched.rows + self.state.snapshot_slots
        self.slots = slots
        self.manager = StateManager(layout, self.frames if layout.paged else 0, slots, self.state)
        self.runner = DeviceRunner(
            self.model,
            layout,
            self.device,
            self.strategy,
            rows=self.sched.rows,
            max_len=self.max_len,
            frames=self.frames if layout.paged else 0,
            slots=slots,
            kit=self.kit,
            step_tokens=self.sched.step_tokens or 0,
            guesses=guesses,
        )
        if self.tiers:
            self._add_tiers()
        drafting = None if lookup is None else Drafting(lookup, lookup.most, self.depth, None)
        shape = self.strategy.canvas
        canvas = None if shape is None else Canvas(shape, self.max_len)
        scheduler = Scheduler(self.sched, self.manager, ahead=self.strategy.ahead, canvas=canvas)
        self.engine = Engine(
            scheduler, self.runner, self.strategy, self.depth, drafting=drafting, adaptive=self.adaptive
        )
        self.tokens: dict[tuple[object, int], list[int]] = {}
        self.finish: dict[tuple[object, int], str] = {}
        self.cached: dict[object, int] = {}
        self.prompts: dict[object, list[int]] = {}
        self.extras: dict[tuple[object, int], list[Any]] = {}
        self.poison()

    def _add_tiers(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        add_lower_tiers(self.tiers, self.manager, self.runner, Path(self.folder.name))

    def close(self) -> None:
        if self.runner.mover is not None:
            self.runner.mover.close()
        if self.folder is not None:
            self.folder.cleanup()

    def add(
        self,
        name: object,
        prompt: Sequence[int],
        count: int,
        *,
        n: int = 1,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        stop: Sequence[int] = (),
        matchers: Sequence[Any] = (),
        **more: object,
    ) -> None:
        job = Job(params, seed, frozenset(stop))
        request = Request(name, tuple(prompt), len(prompt) + count, frozenset(stop), samples=n, payload=job, **more)  # type: ignore[arg-type]
        self.engine.add(request, matchers)
        self.prompts[name] = list(prompt)
        for child in range(n):
            self.tokens[name, child] = []

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = (output.request, output.child)
            assert key not in self.finish, f"{key} goes on after its end"
            self.tokens[key] += output.tokens
            self.cached[output.request] = output.cached
            if output.extra is not None:
                self.extras.setdefault(key, []).append(output.extra)
            if output.finish:
                self.finish[key] = output.finish.value

    def step(self) -> None:
        self.take(self.engine.step())
        self.manager.check()
        self.poison()

    def run(self, *, preempt: random.Random | None = None, most: int = 5000) -> None:
        """To the end; `preempt` throws a random running sequence out at random steps, up to eight times: with one token
        a step and no cache, endless preemption would be endless work."""
        scheduler = self.engine.scheduler
        left = 8
        for _ in range(most):
            if not self.engine.busy:
                self.settled()
                return
            if preempt is not None and left and scheduler._running and preempt.random() < 0.15:
                left -= 1
                scheduler._preempt(preempt.choice(scheduler._running), for_memory=left % 2 == 0)
            self.step()
        raise AssertionError(f"not finished after {most} steps")

    def settled(self) -> None:
        pages, slots = self.manager.census()
        assert pages.held == pages.quarantined == slots.held == slots.quarantined == 0, f"left behind: {pages} {slots}"
        assert not self.manager.moves

    def poison(self) -> None:
        poison(self.engine)


def add_lower_tiers(names: str, manager: StateManager, runner: DeviceRunner, folder: Path) -> None:
    """Tiers below the device, also on a CPU, whose loader has no use for host memory. `names`: host, disk, both."""
    layout, slot = manager.layout, 0
    if layout.recurrent is not None:
        slot = layout.recurrent.slot_bytes
    pages, slots = (600 if layout.paged else 0), (300 if slot else 0)
    lower, host, disk = [], None, None
    if names in ("host", "both"):
        host = HostPlaces(layout, runner.storage, pages, slots, runner.device)
        lower.append(LowerTier(Tier.HOST, pages, slots))
    if names in ("disk", "both"):
        sizes = {"pages": pages, "slots": slots}, {"pages": layout.frame_bytes, "slots": slot}
        disk = DiskStore(folder, bytes(32), {}, *sizes)
        lower.append(LowerTier(Tier.DISK, pages, slots))
    runner.mover = Mover(runner.storage, runner.device, rates := TransferRates(), host, disk)
    manager.tiers = Tiers(
        manager.pages,
        manager.slots,
        lower,
        manager.moves,
        page_bytes=layout.frame_bytes,
        slot_bytes=slot,
        rates=rates,
    )


def poison(engine: Engine) -> None:
    """NaN wherever nobody may read."""
    storage, state, device = engine.runner.storage, engine.scheduler.state, engine.runner.device
    pages, slots = list(state.pages.free_places()), list(state.slots.free_places())

    def fill() -> None:
        storage.poison(pages, slots)

    if device.kind == "cuda":
        device.launch(fill)  # after the steps that are on their way, before those to come
    else:
        fill()


@contextmanager
def late_devices() -> Iterator[None]:
    """Whoever loads a model meanwhile gets the late device (loop depth 1), and freed places are poisoned."""
    step = Engine.step

    def poisoned(self: Engine) -> list[Output]:
        outputs = step(self)
        poison(self)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bankfull.loading, "open_device", lambda name: Late(3) if name == "auto" else open_device(name))
        patch.setattr(Engine, "step", poisoned)
        yield


def device_of(depth: int, seed: int = 0) -> Device:
    """Depth 1 always runs on the device that is late, unless a real one is tested."""
    if DEVICE.type == "cuda":
        return Cuda(DEVICE.index or 0)
    return Late(seed, apart=bool(seed % 2)) if depth else Cpu()


class Guess(Strategy):
    """Proposes what greedy decoding will choose, except where it errs on purpose."""

    exact = True

    def __init__(self, truths: Sequence[Sequence[int]], width: int = 3, seed: int = 0) -> None:
        self.truths = [list(t) for t in truths]
        self._width = width
        self._random = random.Random(seed)
        self.accepted = self.proposed = 0

    def width(self, load: int) -> int:
        return self._width

    def propose(self, view: View) -> Draft | None:
        lines = []
        for row in view.host_rows:
            so_far = view.tokens[row, : int(view.known[row])].tolist()
            truth = next((t for t in self.truths if t[: len(so_far)] == so_far), so_far)
            right = (truth[len(so_far) :] + [0] * self._width)[: self._width]
            lines.append([(t + 1) % 7 if self._random.random() < 0.3 else t for t in right])
        tokens = torch.tensor(lines, device=view.tokens.device)
        return Draft(tokens)

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)

    def observe(self, view: View, verdict: Verdict) -> None:
        if verdict.counts is not None:
            self.accepted += int((verdict.counts - 1).sum())
            self.proposed += len(verdict.counts)


class GuessLookup(Plain):
    """Drafts from the host: what greedy decoding will choose, except where it errs on purpose, and rows with unequal
    numbers of drafts. It stands in for a `SuffixLookup`."""

    def __init__(self, truths: Sequence[Sequence[int]], width: int = 3, seed: int = 0) -> None:
        self.truths = [list(t) for t in truths]
        self.most = width
        self._random = random.Random(seed)
        self._texts: dict[int, list[int]] = {}
        self._found: dict[int, list[int]] = {}

    def open(self, tokens: Sequence[int]) -> int:
        self._texts[number := len(self._texts)] = list(tokens)
        return number

    def close(self, sequence: int) -> None:
        self._texts[sequence] = []

    def extend(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        new = iter(tokens)
        for sequence, count in zip(sequences, counts, strict=True):
            self._texts[sequence] += [next(new) for _ in range(count)]

    def predict(self, sequences: Sequence[int], width: int) -> list[list[float]]:
        for sequence in sequences:
            so_far = self._texts[sequence]
            right = next((t for t in self.truths if t[: len(so_far)] == so_far), so_far)[len(so_far) :][:width]
            found = [(t + 1) % 7 if self._random.random() < 0.2 else t for t in right]
            self._found[sequence] = found[: self._random.choice((0, 1, width))]
        return [[1.0] * len(self._found[sequence]) for sequence in sequences]

    def tokens(self, sequence: int, width: int) -> list[int]:
        return self._found[sequence]


class GuessTree(Guess):
    """Proposes random trees: somewhere in them is a part of what greedy decoding will choose."""

    trees = True

    def propose(self, view: View) -> Draft | None:
        lines, parents = [], []
        for row in view.host_rows:
            so_far = view.tokens[row, : int(view.known[row])].tolist()
            truth = next((t for t in self.truths if t[: len(so_far)] == so_far), so_far)
            tree = random_tree(self._random, truth[len(so_far) :], self._width)
            lines.append([token for token, _ in tree])
            parents.append([parent for _, parent in tree])
        device = view.tokens.device
        return Draft(torch.tensor(lines, device=device), torch.tensor(parents, device=device))


def random_tree(rng: random.Random, right: Sequence[int], width: int) -> list[tuple[int, int]]:
    """Drafts (token, parent) that parents precede; right ones often, wrong ones beside and after them, some twice."""
    drafts: list[tuple[int, int]] = []
    correct = {-1: 0}
    """Nodes on the right path, by how many right tokens have passed."""
    for node in range(width):
        parent = rng.choice([max(correct), rng.randrange(-1, node)])
        at = correct.get(parent)
        if at is not None and at < len(right) and rng.random() < 0.6:
            drafts.append((right[at], parent))
            correct[node] = at + 1
        else:
            drafts.append((rng.randrange(7), parent))
    return drafts
