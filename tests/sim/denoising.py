"""Simulated diffusion models: blocks of masked tokens among prompts in chunks, preemption, aborts and prefix hits.

A step writes the state of a token for good only if all tokens that it sees are known. What is written beside masked
tokens is junk, and a later step that reads it breaks a promise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from bankfull.errors import RequestError
from bankfull.sched.canvas import Canvas
from bankfull.sched.pace import Pace
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import CanvasShape, StepPlan, Work
from tests.sim.device import Device, Footprint, SimulationError, demand
from tests.sim.oracle import extend, next_token
from tests.sim.scenario import Scenario, scenario_of
from tests.sim.tiers import LowerTiers
from tests.sim.world import Receipt, Summary, World

WHOLE = 1 << 30
LONGEST = 128
MOST_TOKENS = 64
"""Of a prompt and its answer, in simulated steps that hold a whole sequence."""


@dataclass(frozen=True, slots=True)
class DenoisingScenario:
    plain: Scenario
    canvas: CanvasShape


def denoising_of(seed: int) -> DenoisingScenario:
    """The arrivals of the scenario of `seed`, for a diffusion model."""
    base, random = scenario_of(seed), Random(seed + 6)
    block = random.choice((1, 2, 3, 4, 6))
    whole = random.random() < 0.3
    canvas = CanvasShape(WHOLE, True, block, block * random.randint(1, 4), random.random() < 0.4)
    if not whole:
        sight = block * random.choice((1, 1, 2))
        canvas = CanvasShape(sight, False, block, sight)
    keys = Paged((TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 4), "float32")))
    latent = Paged((TensorSpec("latent", (1, 3), "float32"),))
    layers = [(random.choice((keys, latent)),) for _ in range(random.randint(1, 3))]
    page = random.choice((1, 2, 4)) * (1 if whole else canvas.sight)
    layout = layout_of(layers, page)
    arrivals = tuple(
        replace(arrival, request=replace(arrival.request, drafts=None))
        for arrival in base.arrivals
        if arrival.request.generates
    )
    step_tokens = MOST_TOKENS if whole else max(canvas.sight * random.choice((2, 3, 8)), base.sched.step_tokens)
    longest = max((arrival.request.limit for arrival in arrivals), default=1) + 2 * canvas.block
    longest += 0 if whole else canvas.sight
    frames = layout.frames_for(longest, step_tokens) * random.choice((1, 1, 2, 4))
    plain = replace(
        base,
        layout=layout,
        frames=frames,
        slots=0,
        drafts=0,
        arrivals=arrivals,
        sched=replace(base.sched, step_tokens=step_tokens, step_ms=0.0, prefill_tokens=0, prefill_rows=0),
        state=replace(base.state, prefix_cache=base.state.prefix_cache and not whole),
        tiers=None,
    )
    return DenoisingScenario(plain, canvas)


class DenoisingDevice(Device):
    def __init__(self, scenario: Scenario, canvas: CanvasShape, lower: LowerTiers | None) -> None:
        super().__init__(scenario.layout, scenario.vocab, Random(scenario.seed + 2), scenario.error_rate, lower)
        self.canvas = canvas
        self.left: dict[int, int] = {}
        """Masked tokens of the block of a sequence, by its key."""
        self.junk = 0

    def _run(self, work: Work, begin: int, mark: Footprint) -> list[int]:
        row = self.rows[work.row]
        known, end, upto = len(row.tokens), begin + work.count, begin + work.count + work.drafts
        demand(end <= known, f"row {work.row} runs to {end} of {known} known tokens")
        sight = self.canvas.sight
        final = 0 if self.canvas.whole else known // sight * sight
        written = []
        for position in range(begin, upto):
            self.junk -= 1
            written.append(row.prefix[position] if position < final else self.junk)
        self._write_pages(row, begin, written, mark)
        row.length = end - work.redone
        mark.accepted[row.key] = 0
        demand(
            row.length <= final, f"row {work.row} keeps the state of {row.length} tokens, of which {final} are final"
        )
        if not work.block:
            demand(not work.sample and not work.drafts, f"row {work.row} predicts without a block")
            demand(end % sight == 0, f"a chunk of row {work.row} ends at {end}, within a block")
            return []
        demand(work.sample and end == known, f"row {work.row} denoises before its tokens are computed")
        demand(1 <= work.block <= work.drafts, f"row {work.row} denoises {work.block} of {work.drafts} masked tokens")
        demand(work.first == work.count - self.canvas.shifted, f"row {work.row} predicts from another position")
        left = self.left.setdefault(row.key, work.block)
        left -= self.random.randint(1, left)
        self.left[row.key] = left
        if left:
            return []
        del self.left[row.key]
        given = []
        for _ in range(work.block):
            token = next_token(row.prefix[-1], row.child, self.vocab)
            given.append(token)
            row.tokens.append(token)
            row.prefix.append(extend(row.prefix[-1], token))
        return given


class DenoisingWorld(World):
    """Checks what does not assume one token after the other: pools, pages, rows, outputs, and that all ends."""

    def __init__(self, made: DenoisingScenario) -> None:
        super().__init__(made.plain)
        canvas = Canvas(made.canvas, LONGEST)
        self.sched = Scheduler(made.plain.sched, self.state, lambda: self.clock, canvas=canvas)
        self.sched.pace = Pace(0.0, least=1)
        self.device = DenoisingDevice(made.plain, made.canvas, self.device.lower)
        self.runner = self.device

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0].time <= self.clock:
            request = self.arrivals.popleft().request
            try:
                self.sched.add(request)
            except RequestError:
                self.summary.refused += 1
                continue
            self.requests[request.id] = request  # type: ignore[index]
            for child in range(request.samples):
                if child not in request.finished:
                    before = list(request.generated[child]) if request.generated else []
                    self.receipts[request.id, child] = Receipt(before)  # type: ignore[index]
                    self.summary.resumed += bool(before)
            self.patience += 200 + 24 * request.samples * request.limit * (2 + len(self.receipts))
        self.sched.sealed = not self.arrivals

    def _check_plan(self, plan: StepPlan, drafts: int, ready: list[Sequence]) -> None:
        config = self.scenario.sched
        demand(plan.tokens <= config.step_tokens, f"{plan.tokens} tokens in a step of {config.step_tokens}")
        rows = [work.row for work in plan.work]
        demand(len(set(rows)) == len(rows), "a row works twice in one step")
        by_row, holders = {seq.row: seq for seq in self.sched._running}, self._page_holders()
        for work in plan.work:
            self._check_writes(by_row[work.row], holders)
        self.summary.drafts += sum(work.block for work in plan.work)
        self.summary.forks += any(work.block for work in plan.work) and not all(work.block for work in plan.work)


def simulate_denoising(seed: int) -> Summary:
    """Run the scenario of `seed` with a diffusion model. `forks` counts steps with both prompts and blocks."""
    try:
        return DenoisingWorld(denoising_of(seed)).run()
    except Exception as problem:
        raise SimulationError(f"denoising, seed {seed}: {problem!r}") from problem
