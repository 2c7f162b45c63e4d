"""A server with drafts is not slower than one without: on the engine, with a clock that charges each pass that ran.

The clock advances with the passes of the target model, of the drafter and of the heads that really ran: the bytes of
the weights once, and the operations of each token. So steps that the scheduler plans, drafts that are verified, prompts
that a drafter runs and tokens that it catches up have their price, whoever decides about them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median

import pytest
import torch
from torch import Tensor

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.adaptive import SELDOM, STOP_LOSS, AdaptiveWidth
from bankfull.decode.draft import DraftModel
from bankfull.decode.ledger import KEPT_STEPS, LOSS_SHARE, START_STEPS
from bankfull.decode.lookahead import Lookahead
from bankfull.decode.medusa import Medusa
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, OwnModel, Strategy, View
from bankfull.decode.streaming import Streaming
from bankfull.layers.batch import Batch
from bankfull.runtime.device import Cpu
from bankfull.runtime.forward import Forward
from bankfull.runtime.marks import HostMark
from tests.decode.test_eagle import random_eagle, strategy_of
from tests.decode.test_medusa import random_heads
from tests.decode.test_streaming import random_streams
from tests.kit import Bench, Guess
from tests.tiny import VOCAB, kit_of, model_of

HOW = (torch.float32, "torch")
TARGET, TOKEN = 1.0, 0.06
"""What a pass of the target model costs: its weights, and each of its tokens."""
DRAFTER = 0.35
"""A pass of a drafter's own model, relative to one of the target model. Medusa's heads are charged as one pass."""
REQUESTS, PROMPT, NEW = 6, 14, 90
Script = Callable[[int], bool]
"""Whether the drafts of the given proposal are right."""


class CountingClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.target = self.drafter = 0
        """Passes."""

    def __call__(self) -> float:
        return self.seconds

    def charge(self, share: float, tokens: int) -> None:
        self.seconds += share * (TARGET + TOKEN * tokens)


class CountedCpu(Cpu):
    def __init__(self, clock: CountingClock) -> None:
        super().__init__()
        self._now = clock

    def mark(self) -> HostMark:
        return HostMark(self._now())


class CountedForward:
    """Passes of the target model."""

    def __init__(self, forward: Forward, clock: CountingClock) -> None:
        self._forward, self._clock = forward, clock

    def __call__(self, batch: Batch) -> Tensor:
        self._clock.target += 1
        self._clock.charge(1.0, len(batch.tokens))
        return self._forward(batch)

    @property
    def tapped(self) -> Mapping[int, Tensor]:
        return self._forward.tapped


class WrongDraft(DraftModel):
    """A drafter equal to the target model, whose drafts are replaced by wrong ones as a script says."""

    def __init__(self, script: Script) -> None:
        super().__init__(OwnModel(model_of("llama", *HOW), kit_of("llama", *HOW)))
        self._script, self._proposals = script, 0

    def propose(self, view: View) -> Draft | None:
        draft = super().propose(view)
        self._proposals += 1
        if draft is not None and not self._script(self._proposals):
            draft.tokens = (draft.tokens + 1) % VOCAB
        return draft


class NeverErring(random.Random):
    def random(self) -> float:
        return 1.0


class WrongGuess(Guess):
    """The same without a model: the heads that it stands for cost a pass."""

    def __init__(self, script: Script) -> None:
        super().__init__(truths(), width=4)
        self._script, self._proposals = script, 0
        self._random = NeverErring()
        self.clock: CountingClock | None = None

    def propose(self, view: View) -> Draft | None:
        assert self.clock is not None
        self.clock.charge(DRAFTER, len(view.host_rows))
        self._proposals += 1
        draft = super().propose(view)
        if draft is not None and not self._script(self._proposals):
            draft.tokens = (draft.tokens + 1) % VOCAB
        return draft


def asked() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def bench_of(strategy: Strategy, adaptive: bool = True) -> tuple[Bench, CountingClock]:
    clock = CountingClock()
    device = CountedCpu(clock)
    sched, state = SchedConfig(rows=4, step_tokens=64), StateConfig(page_tokens=4, prefix_cache=False)
    model = model_of("llama", *HOW)
    bench = Bench(model, device, 0, sched, state, strategy)
    if adaptive:
        chooser = AdaptiveWidth(strategy.widths(), DRAFTER if strategy.share else 0.0, strategy.late)
        bench = Bench(model, device, 0, sched, state, strategy, adaptive=chooser)
    bench.engine._clock = clock
    bench.runner.run_model = CountedForward(bench.runner.run_model, clock)
    steps = getattr(strategy, "_steps", None)
    if steps is not None:
        own = steps.run

        def counted_own(batch: Batch) -> Tensor:
            clock.drafter += 1
            clock.charge(DRAFTER, len(batch.tokens))
            return own(batch)

        steps.run = counted_own
    if isinstance(strategy, Medusa):
        stack = strategy._stack
        assert stack is not None
        candidates = stack.candidates

        def counted_heads(hidden: Tensor, most: int) -> Tensor:
            clock.drafter += 1
            clock.charge(DRAFTER, len(hidden))
            return candidates(hidden, most)

        stack.candidates = counted_heads  # type: ignore[method-assign]
    if isinstance(strategy, WrongGuess):
        strategy.clock = clock
    return bench, clock


def request_seconds(bench: Bench, number: int) -> float:
    """The time of one request that runs alone."""
    before = bench.engine._clock()
    bench.add(number, asked()[number % REQUESTS], NEW)
    bench.run()
    return bench.engine._clock() - before


def seconds(strategy: Strategy, together: bool = False) -> tuple[list[float], Bench, CountingClock]:
    """The time of each request, one after the other, or of all together."""
    bench, clock = bench_of(strategy, adaptive=not isinstance(strategy, Plain))
    if not together:
        return [request_seconds(bench, number) for number in range(REQUESTS)], bench, clock
    for i, prompt in enumerate(asked()):
        bench.add(i, prompt, NEW)
    bench.run()
    return [clock()], bench, clock


@lru_cache
def plain(together: bool = False) -> tuple[list[float], dict[tuple[object, int], list[int]]]:
    spent, bench, _ = seconds(Plain(), together)
    return spent, bench.tokens


def truths() -> list[list[int]]:
    return [prompt + plain()[1][i, 0] for i, prompt in enumerate(asked())]


SCRIPTS: dict[str, Script] = {
    "always wrong": lambda proposal: False,
    "right, then wrong": lambda proposal: proposal <= 40,
    "wrong, then right": lambda proposal: proposal > 12,
    "in turns": lambda proposal: proposal % 2 == 0,
    "long turns": lambda proposal: proposal // 16 % 2 == 0,
    "one of four": lambda proposal: proposal % 4 == 0,
}
STEADY = ("always wrong", "in turns", "one of four")
OVERSHOOT = STOP_LOSS + 4
"""Plain steps' time that a step may lose beyond the limit: a prompt that is caught up, and drafts in vain."""


def assert_never_slower(spent: Sequence[float], without: Sequence[float], steady: bool = True) -> None:
    """`steady`: whether the drafts are alike all the time. If they change, what was won before is at stake again."""
    step = TARGET + TOKEN
    assert spent[0] <= without[0] * (1 + LOSS_SHARE) + (START_STEPS + OVERSHOOT) * step, "cold: the first request"
    assert sum(spent) <= sum(without) * (1 + LOSS_SHARE) + (START_STEPS + OVERSHOOT) * step
    for first in range(len(spent)):
        lost = sum(spent[first:]) - (1 + LOSS_SHARE) * sum(without[first:])
        assert lost <= (KEPT_STEPS + OVERSHOOT) * step, f"from request {first} on"
    warm = [before / after for before, after in zip(without[1:], spent[1:], strict=True)]
    assert not steady or not warm or median(warm) > 1 - 2 * LOSS_SHARE, "warm: the requests after it"


def case(make: Callable[[Script], Strategy], script: str, together: bool = False, full: bool = False) -> object:
    name = f"{'draft' if make is WrongDraft else 'heads'}, {script}{', four at once' if together else ''}"
    return pytest.param(make, script, together, id=name, marks=pytest.mark.full if full else ())


CASES = [
    *[case(WrongDraft, script, full=script in ("in turns", "one of four")) for script in SCRIPTS],
    *[case(WrongGuess, script) for script in SCRIPTS],
    *[case(WrongDraft, script, together=True, full=script == "long turns") for script in list(SCRIPTS)[::2]],
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("make", "script", "together"), CASES)
def test_adversarial_drafts_are_never_slower(make: Callable[[Script], Strategy], script: str, together: bool) -> None:
    without, tokens = plain(together)
    spent, bench, clock = seconds(make(SCRIPTS[script]), together)
    assert bench.tokens == tokens
    assert_never_slower(spent, without, steady=script in STEADY)
    assert sum(bench.engine.totals.drafted), "drafts were tried"
    if make is WrongDraft and script == "always wrong" and not together:
        assert 0 < clock.drafter < 0.06 * clock.target, "it runs for a few trials, and not the prompts of all requests"


OWN: dict[str, Callable[[], Strategy]] = {
    "medusa": lambda: Medusa(random_heads(1, heads=3), nodes=8),
    "eagle": lambda: strategy_of(random_eagle(1), depth=3),
    "eagle-tree": lambda: strategy_of(random_eagle(1), depth=3, tree="dynamic", branch=3, nodes=9),
    "streaming": lambda: Streaming(random_streams(1), nodes=8),
    "lookahead": lambda: Lookahead(4, 3, 4),
}
FULL = ("eagle", "eagle-tree", "streaming", "lookahead")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in OWN])
def test_untrained_drafters_are_never_slower(name: str) -> None:
    without, tokens = plain()
    spent, bench, _ = seconds(OWN[name]())
    assert bench.tokens == tokens
    assert_never_slower(spent, without)


DRAFTERS = pytest.mark.parametrize("make", (WrongDraft, WrongGuess), ids=("draft", "heads"))


@pytest.mark.few(1)
@DRAFTERS
def test_drafts_that_are_right_are_used(make: Callable[[Script], Strategy]) -> None:
    without, tokens = plain()
    spent, bench, _ = seconds(make(lambda proposal: True))
    assert bench.tokens == tokens
    assert spent[-1] < 0.75 * without[-1]


@pytest.mark.few(1)
@DRAFTERS
def test_a_drafter_that_has_failed_is_found_when_it_becomes_right(make: Callable[[Script], Strategy]) -> None:
    """Trials are paid from a small share of all time, so this may take as long as a width waits for its next trial."""
    bench, _ = bench_of(make(SCRIPTS["wrong, then right"]))
    fast = 0.8 * min(plain()[0])
    needed = next((n for n in range(4 * SELDOM // NEW) if request_seconds(bench, n) < fast), None)
    assert needed is not None and needed * NEW <= SELDOM, needed


def test_the_clock_would_show_a_loss() -> None:
    """The same drafts without a choice of widths: what the tests above forbid."""
    bench, _ = bench_of(WrongDraft(SCRIPTS["always wrong"]), adaptive=False)
    with pytest.raises(AssertionError, match="cold"):
        assert_never_slower([request_seconds(bench, 0)], plain()[0][:1])
