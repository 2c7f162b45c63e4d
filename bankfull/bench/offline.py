"""Offline benchmark: speed of a model in this process next to the machine's limit, for one stream or many requests.

Prompts are random token ids, different for each request, so that the prefix cache is never hit; the end of text is
ignored. The first repetition is a warm-up and is not counted.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any

from bankfull.errors import ConfigError, RequestError
from bankfull.limits.explain.instruments import Bindings, EngineWatch, TapeSummary, bindings, taped_of
from bankfull.limits.explain.kernel_profile import KernelCosts, PhaseProfile, Row, Spent
from bankfull.limits.machine import ceilings
from bankfull.limits.machine.ceilings import Ceilings, better
from bankfull.limits.meter.closed_form import ClosedForm, closed_form
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import least_seconds
from bankfull.limits.meter.step import StepShape
from bankfull.limits.statistics import Spread, per_second, share_outside, spread
from bankfull.llm import LLM
from bankfull.ops.cost import Cost
from bankfull.ops.products.activations import EXACT
from bankfull.sample.params import SamplingParams

MOST_TOKENS = 1 << 24
"""Tokens of one repetition at most; bounds the memory that a mistyped option can allocate."""


@dataclass(frozen=True, slots=True)
class OfflineLoad:
    """The work of each repetition."""

    prompt_len: int
    output_len: int
    requests: int = 1
    reps: int = 5
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("prompt_len", "output_len", "requests", "reps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.requests * (self.prompt_len + self.output_len) > MOST_TOKENS:
            raise ConfigError(
                f"{self.requests} requests of {self.prompt_len} + {self.output_len} tokens are more than "
                f"{MOST_TOKENS} tokens at once; lower one of the three."
            )
        if self.params.greedy and (self.top_k, self.top_p) != (0, 1.0):
            raise ConfigError("top_k and top_p have no effect without a temperature above 0; give one too.")

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.output_len,
            ignore_eos=True,
        )

    @property
    def sampling(self) -> str:
        """Sampling parameters for a title; empty for greedy decoding."""
        named = {"temperature": (self.temperature, 0.0), "top_k": (self.top_k, 0), "top_p": (self.top_p, 1.0)}
        return "".join(f", {name} {value:g}" for name, (value, neutral) in named.items() if value != neutral)

    def fits(self, max_len: int) -> None:
        needed = self.prompt_len + self.output_len
        if needed > max_len:
            raise ConfigError(
                f"A prompt of {self.prompt_len} and an output of {self.output_len} tokens need a context of {needed}, "
                f"but this model runs with {max_len}; shorten one of the two."
            )

    def prompts(self, turn: int, vocab: int) -> list[list[int]]:
        """Reproducible for a seed and turn; turns share no prompt."""
        return [
            random.Random(f"{self.seed}/{turn}/{number}").choices(range(vocab), k=self.prompt_len)
            for number in range(self.requests)
        ]


@dataclass(frozen=True, slots=True)
class OfflinePhase:
    """A time span and the steps that ran in it."""

    tokens: int
    seconds: float
    inside: float
    """Seconds inside kernels: those of the tape and of the head; without a tape, inside launched work by the device's
    clock."""
    steps: int
    sequences: int
    """Sequences summed over the steps."""
    cost: Cost
    costs: tuple[Cost, ...] = field(repr=False)
    shapes: tuple[StepShape, ...] = field(default=(), repr=False)

    @property
    def mean_batch(self) -> float | None:
        return self.sequences / self.steps if self.steps else None

    def figures(self, ceilings: Ceilings | None, dtype: str) -> dict[str, float | None]:
        least = None
        if ceilings is not None and self.seconds:
            least = least_seconds(self.costs, ceilings, dtype)
        return {
            "tokens_per_s": per_second(self.tokens, self.seconds),
            "seconds": self.seconds,
            "host_share": share_outside(self.inside, self.seconds),
            "bytes_per_s": per_second(self.cost.bytes, self.seconds),
            "flop_per_s": per_second(self.cost.flops, self.seconds),
            "percent_of_limit": None if least is None else 100 * least / self.seconds,
        }


@dataclass(frozen=True, slots=True)
class Repetition:
    """One repetition: until the first token of any request (`prefill`), and after it (`decode`)."""

    prefill: OfflinePhase
    decode: OfflinePhase
    whole: OfflinePhase
    """The whole repetition; its tokens are the output tokens."""


@dataclass(frozen=True, slots=True)
class OfflineReport:
    kind: str
    load: OfflineLoad
    dtype: str
    device: str
    turns: list[Repetition]
    before: Ceilings | None
    after: Ceilings | None
    bound: Bindings
    activations: str = EXACT.name
    """The rule for activations, by name."""
    tape: TapeSummary | None = None
    profile: tuple[PhaseProfile, ...] | None = None
    """Profile of one more repetition, if requested."""
    uncaptured: str | None = None
    """Why steps run without capture although the device captures steps."""

    @property
    def ceilings(self) -> Ceilings | None:
        """The better of the measurements before and after."""
        return None if self.before is None or self.after is None else better(self.before, self.after)

    def figures(self) -> list[dict[str, float | None]]:
        """One flat set of figures per repetition."""
        return [self._of(turn) for turn in self.turns]

    def summary(self) -> dict[str, Spread | None]:
        """Spreads over the repetitions; None for figures that this load or device does not have."""
        rows = self.figures()
        known = {name: [row[name] for row in rows] for name in rows[0]}
        return {
            name: spread([v for v in values if v is not None]) if None not in values else None
            for name, values in known.items()
        }

    def profile_rows(self) -> dict[str, list[Row]]:
        """Rows by phase, for phases with steps."""
        return {part.name: part.rows(self.ceilings, self.dtype) for part in self.profile or () if part.steps}

    @property
    def cost(self) -> Cost:
        """The cost of a repetition, whose operands the limits count with."""
        return self.turns[0].whole.cost

    def as_json(self) -> dict[str, Any]:
        used = self.ceilings
        return {
            "kind": self.kind,
            "load": asdict(self.load),
            "dtype": self.dtype,
            "activations": self.activations,
            "device": self.device,
            "tape": None if self.tape is None else asdict(self.tape),
            "uncaptured": self.uncaptured,
            "ceilings": None
            if used is None or self.before is None or self.after is None
            else {"used": used.as_json(), "before": self.before.as_json(), "after": self.after.as_json()},
            "operations": self.bound,
            "repetitions": self.figures(),
            "summary": {name: None if s is None else asdict(s) for name, s in self.summary().items()},
            "profile": None if self.profile is None else self.profile_rows(),
        }

    def _of(self, turn: Repetition) -> dict[str, float | None]:
        used = self.ceilings

        def named(part: str, phase: OfflinePhase) -> dict[str, float | None]:
            figures = phase.figures(used, self.dtype)
            return {f"{part}_{name}": value for name, value in figures.items()}

        if self.kind == "latency":
            return {
                "time_to_first_token_s": turn.prefill.seconds,
                **named("prefill", turn.prefill),
                **named("decode", turn.decode),
            }
        total = turn.whole.tokens + self.load.requests * self.load.prompt_len
        return {
            **named("output", turn.whole),
            "total_tokens_per_s": per_second(total, turn.whole.seconds),
            "steps": turn.whole.steps,
            "mean_batch": turn.whole.mean_batch,
        }


class Bench:
    """Repetitions of one load on one model."""

    def __init__(self, llm: LLM, load: OfflineLoad, *, dtype: str, profile: bool = False) -> None:
        load.fits(llm.max_model_len)
        if profile and taped_of(llm.loaded.frontend.engine) is None:
            raise ConfigError(
                "A profile needs steps captured on a tape, as with the native CPU kernels; leave out --profile."
            )
        self._profiled = profile
        self._llm, self._load, self._dtype = llm, load, dtype
        self._front = llm.loaded.frontend
        self._salt = secrets.token_hex(8)  # keeps prompts of earlier benchmarks on this engine out of the cache
        self._params = load.params

    def run(self, kind: str, advance: Callable[[int], None] | None = None) -> OfflineReport:
        """`advance`: callback with the number of completed repetitions."""
        device = self._llm.loaded.device.kind
        before = self._ceilings()
        turns = []
        with EngineWatch(self._front.engine) as watched:
            self._turn(0, watched)
            for turn in range(1, self._load.reps + 1):
                turns.append(self._turn(turn, watched))
                if advance is not None:
                    advance(turn)
            profile = self._profile(watched) if self._profiled else None
        ran = {name.rpartition("/")[2] for name in self._metered.cost(StepShape.decode()).calls}
        bound = bindings(self._llm.loaded.kit, ran)
        return OfflineReport(
            kind,
            self._load,
            self._dtype,
            device,
            turns,
            before,
            self._ceilings(),
            bound,
            self._llm.loaded.build.activations.name,
            watched.tape,
            profile,
            self._llm.loaded.uncaptured,
        )

    @cached_property
    def _metered(self) -> MeteredModel:
        return MeteredModel.of_build(self._llm.loaded.files, self._llm.loaded.build)

    @cached_property
    def _form(self) -> ClosedForm:
        return closed_form(self._metered)

    def _ceilings(self) -> Ceilings | None:
        """Ceilings of the machine or device, measured now."""
        return ceilings.of_device(self._llm.loaded.device, refresh=True)

    def _profile(self, watched: EngineWatch) -> tuple[PhaseProfile, ...]:
        """One more repetition with each kernel timed."""
        spent: list[Spent] = []
        taped = watched.times.taped
        assert taped is not None
        with watched.times.by_kernel():
            turn = self._turn(self._load.reps + 1, watched, lambda: spent.append(watched.times.take()))
            spent.append(watched.times.take())
        costs = KernelCosts(self._metered, taped.tape.traffic)
        phases = {"prefill": turn.prefill, "decode": turn.decode}
        return tuple(
            costs.part(name, phase.seconds, taken, phase.shapes, phase.costs)
            for (name, phase), taken in zip(phases.items(), spent, strict=True)
        )

    def _turn(self, number: int, watched: EngineWatch, at_first: Callable[[], None] | None = None) -> Repetition:
        """`at_first` is called between the two phases."""
        front, load = self._front, self._load
        prompts = load.prompts(number, front.vocab)
        watched.take_shapes()
        begun, inside = perf_counter(), watched.times.seconds
        first, first_inside, first_shapes, produced_first = begun, inside, list[StepShape](), 0
        ids = [front.submit(prompt, self._params, salt=f"{self._salt}/{number}") for prompt in prompts]
        open_, produced = set(ids), 0
        try:
            while open_:
                deltas = front.step()
                for delta in deltas:
                    if delta.error is not None:
                        raise RequestError(delta.error)
                    produced += len(delta.token_ids)
                    if delta.finish_reason is not None:
                        open_.discard(delta.request_id)
                if produced and not first_shapes:
                    first, first_inside = perf_counter(), watched.times.seconds
                    first_shapes, produced_first = watched.take_shapes(landed=True), produced
                    if at_first is not None:
                        at_first()
        finally:
            self._forget(ids)
        ended, last_inside, shapes = perf_counter(), watched.times.seconds, watched.take_shapes()
        return Repetition(
            self._phase(load.prompt_len * load.requests, first - begun, first_inside - inside, first_shapes),
            self._phase(produced - produced_first, ended - first, last_inside - first_inside, shapes),
            self._phase(produced, ended - begun, last_inside - inside, [*first_shapes, *shapes]),
        )

    def _phase(self, tokens: int, seconds: float, inside: float, shapes: Sequence[StepShape]) -> OfflinePhase:
        costs = tuple(self._form.cost(shape) for shape in shapes)
        sequences = sum(len(shape.counts) for shape in shapes)
        return OfflinePhase(tokens, seconds, inside, len(shapes), sequences, sum(costs, Cost()), costs, tuple(shapes))

    def _forget(self, ids: Sequence[Hashable]) -> None:
        for request in ids:
            self._front.abort(request)
            self._front.pending.pop(request, None)
