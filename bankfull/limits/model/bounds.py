"""The roofline of a model on a machine.

Covers each operation of prefill and decode, the batch size at which decoding becomes compute-bound, throughput and
latency by batch size, and what other storage or another architecture would change. The meter derives all of it from
the configuration; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any

import numpy as np

from bankfull.errors import ConfigError
from bankfull.limits.machine.targets import TargetMachine
from bankfull.limits.meter.closed_form import closed_form, experts_used, shares_of
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import Bound, Roofline, bound_of, roofline
from bankfull.limits.meter.step import LARGEST_STEP, StepShape
from bankfull.limits.model.drafters import DrafterChoice, DraftTimes, forecast_of
from bankfull.limits.model.memory import Memory, memory_of, sequence_bytes, weight_bytes
from bankfull.limits.model.recipe import Recipe
from bankfull.limits.model.speculation import BATCHES, GainForecast, Seconds
from bankfull.limits.model.variants import variants_of
from bankfull.ops.cost import Cost, Rates
from bankfull.ops.meter import Ledger
from bankfull.ops.pages.rounded import pages_name

MOST_BATCH = 1 << 20
LINEAR, EXPERTS = "linear", "expert"
"""Substrings of the names of all operations that multiply by weights."""
NOTHING = 0.02
"""Relative change below which a variant is not listed."""
LEAST_CURVE, MOST_CURVE = 64, 8192
"""The batch curve extends past the memory limit and past the ridge point, within these bounds on the batch size."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The shortest time of a step on a machine, and what bounds it."""

    seconds: float
    bound: Bound


class DecodeLine:
    """Cost of a decode step at one context length. It is linear in the batch size, except for experts that no token of
    the step uses: their bytes are not read."""

    def __init__(self, metered: MeteredModel, context: int, only: str = "") -> None:
        """`only`: count only operations whose names contain this."""

        def found(batch: int) -> Cost:
            return _sum(metered.cost(StepShape.decode(batch, context)), only)

        self._shares = shares_of(metered)
        self._experts: list[float] = []
        if self._shares:
            batches = [1, 2, *(int(times / share) + 3 for share in self._shares for times in (1, 3))]
            known = np.array([[1.0, batch, *experts_used(batch, self._shares)] for batch in batches])
            self._experts = np.linalg.lstsq(known, np.array([found(b).read for b in batches]), rcond=None)[0][
                2:
            ].tolist()
        one, two = found(1), found(2)
        used = self._read_of_experts(2) - self._read_of_experts(1)
        self.each = two - one - Cost(read=used)
        """Cost of one more sequence, where all experts are used."""
        unused = sum(self._experts) - self._read_of_experts(1)
        self.shared = one - self.each + Cost(read=unused)
        """Cost that does not depend on the batch size: reading the weights, all experts among them."""

    def _read_of_experts(self, batch: float) -> float:
        """Bytes of the experts that the batch is expected to use."""
        return sum(read * used for read, used in zip(self._experts, experts_used(batch, self._shares), strict=True))

    def cost(self, batch: float) -> Cost:
        unused = sum(self._experts) - self._read_of_experts(batch)
        return self.shared + self.each * batch + Cost(read=-unused)


def _sum(ledger: Ledger, only: str) -> Cost:
    parts = (only, EXPERTS) if only == LINEAR else (only,)
    return sum((cost for name, cost in ledger.total.items() if any(part in name for part in parts)), Cost())


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A machine's ceilings for the steps of one model."""

    machine: TargetMachine
    dtype: str
    """Dtype of the computation."""
    typical: Cost
    """A step of the model: its operands tell which peaks count."""

    @property
    def rates(self) -> Rates:
        return self.machine.ceilings.rates(self.dtype)

    @property
    def peak(self) -> float:
        """FLOP/s that the typical step could reach."""
        return self.typical.peak(self.rates)

    @property
    def measured(self) -> bool:
        return self.peak < inf

    @property
    def shown_rates(self) -> str:
        """The peaks that count, as text."""
        return self.machine.ceilings.shown_rates(self.dtype, self.typical)

    @property
    def caveats(self) -> list[str]:
        """Caveats to print next to every time derived from these ceilings."""
        unmeasured = self.machine.ceilings.caveat(self.dtype, self.typical)
        return [*self.machine.caveats, *([] if unmeasured is None else [unmeasured])]

    def timing(self, cost: Cost) -> StepTime:
        bandwidth, rates = self.machine.ceilings.read_at(cost.read), self.rates
        return StepTime(cost.seconds(rates, bandwidth), bound_of(cost, rates, bandwidth))

    def turning_batch(self, line: DecodeLine) -> int | None:
        """The smallest batch whose decode step is compute-bound; None if no batch is.

        A step of B sequences needs (shared + B each) bytes / bandwidth for memory and B each FLOP / peak for
        arithmetic. If reading one sequence's own bytes takes longer than its arithmetic, every batch is memory-bound.
        """
        ceilings = self.machine.ceilings
        fast = ceilings.read_at(0.0)
        batch = _crossing(line, self.rates, fast)
        if batch is not None and ceilings.read_at(line.cost(batch).read) == fast:
            return batch
        return _crossing(line, self.rates, ceilings.read_bytes_per_s)


def _crossing(line: DecodeLine, rates: Rates, bandwidth: float) -> int | None:
    gain = line.each.arithmetic(rates) - line.each.bytes / bandwidth
    if gain <= 0:
        return None
    behind = line.shared.bytes / bandwidth - line.shared.arithmetic(rates)
    batch = max(1, ceil(behind / gain))
    while batch > 1 and bound_of(line.cost(batch - 1), rates, bandwidth) == "arithmetic":
        batch -= 1
    while bound_of(line.cost(batch), rates, bandwidth) == "memory":
        batch += 1
    return batch if batch <= MOST_BATCH else None


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Decoding at one batch size."""

    batch: int
    seconds: float
    """Step time, which is the time per token of each sequence."""
    tokens_per_s: float
    """Throughput of all sequences together."""
    bound: Bound
    bytes: int
    """Memory for weights, state and the step's intermediate results."""
    fits: bool | None


@dataclass(frozen=True, slots=True)
class PhaseRoofline:
    title: str
    phase: str
    sequences: int
    tokens: int
    context: int
    roofline: Roofline
    step: StepShape

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.roofline.seconds if self.roofline.seconds else inf

    def as_json(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "context": self.context,
            "seconds": self.roofline.seconds,
            "bound": self.roofline.bound,
            "tokens_per_s": self.tokens_per_s,
            "operations": self.roofline.as_rows(),
        }


@dataclass(frozen=True, slots=True)
class Change:
    """A variant compared with the model as configured."""

    name: str
    options: dict[str, str]
    trained: bool
    weight_bytes: int
    state_bytes: int
    """Bytes per sequence."""
    seconds: float
    """Time of a decode step at the first batch and context."""
    gain: float
    """Speed-up over the model as configured."""
    turning_batch: int | None
    most_sequences: int | None
    bound: Bound

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RooflineQuery:
    """The steps to analyse."""

    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (1024,)
    prompt: int = 1024

    def __post_init__(self) -> None:
        for name, values in (("batch", self.batches), ("context", self.contexts), ("prompt", (self.prompt,))):
            if not values or any(not 1 <= value <= MOST_BATCH for value in values):
                raise ConfigError(f"{name} must be a whole number from 1 to {MOST_BATCH}.")
        if max(self.batches) * self.prompt > LARGEST_STEP:
            raise ConfigError(
                f"{max(self.batches)} prompts of {self.prompt} tokens are more than {LARGEST_STEP} tokens in one step; "
                "lower --batch or --prompt."
            )

    @property
    def context(self) -> int:
        return self.contexts[0]

    def fits(self, longest: int) -> None:
        wanted = max(*self.contexts, self.prompt)
        if wanted > longest:
            raise ConfigError(
                f"A context of {wanted} tokens exceeds the {longest} that this model supports; shorten it."
            )


class ModelRoofline:
    """One model on one machine; each part is computed on first use."""

    def __init__(
        self, recipe: Recipe, machine: TargetMachine, query: RooflineQuery, drafter: DrafterChoice | None = None
    ) -> None:
        """`drafter`: speculative decoding whose gain is predicted."""
        self.recipe, self.machine, self.query, self.drafter = recipe, machine, query, drafter
        self.metered = recipe.metered()
        query.fits(self.metered.model.max_positions)
        self.arithmetic = _arithmetic(machine, recipe, self.metered)

    @cached_property
    def phases(self) -> list[PhaseRoofline]:
        prompt = self.query.prompt
        phases = [self._phase(f"prefill of {prompt} tokens", "prefill", StepShape.prefill(prompt), prompt)]
        for context in self.query.contexts:
            for batch in self.query.batches:
                title = f"decode, {batch} sequence{'s' * (batch > 1)} at context {context}"
                phases.append(self._phase(title, "decode", StepShape.decode(batch, context), context))
        return phases

    def _phase(self, title: str, phase: str, step: StepShape, context: int) -> PhaseRoofline:
        bound = roofline(self.metered.cost(step), self.machine.ceilings, self.recipe.dtype_name)
        return PhaseRoofline(title, phase, len(step.counts), step.tokens, context, bound, step)

    @cached_property
    def line(self) -> DecodeLine:
        return DecodeLine(self.metered, self.query.context)

    @cached_property
    def turning_batch(self) -> int | None:
        return self.arithmetic.turning_batch(self.line)

    @cached_property
    def linear_turning_batch(self) -> int | None:
        """The same for the linear layers alone, without the KV cache and other state."""
        return self.arithmetic.turning_batch(DecodeLine(self.metered, self.query.context, LINEAR))

    @cached_property
    def memory(self) -> Memory:
        query, batch = self.query, max(self.query.batches)
        steps = StepShape.prefill(query.prompt), StepShape.decode(batch, query.context)
        largest = max(steps, key=lambda step: step.tokens)
        return memory_of(self.recipe, batch, query.context, largest, self.machine.memory)

    @cached_property
    def curve(self) -> list[CurvePoint]:
        return [self.point(batch) for batch in self._curve_batches()]

    def _curve_batches(self) -> Iterator[int]:
        reach = max(LEAST_CURVE, *self.query.batches, self.turning_batch or 0, self.memory.most_sequences or 0)
        reach = min(MOST_CURVE, 2 * reach)
        batch = 1
        while batch <= reach:
            yield batch
            batch *= 2

    def point(self, batch: int) -> CurvePoint:
        timing, memory = self.arithmetic.timing(self.line.cost(batch)), self.memory
        taken = memory.weights + memory.step + batch * memory.state_per_sequence
        fits = None if memory.room is None else taken <= memory.room
        return CurvePoint(batch, timing.seconds, batch / timing.seconds, timing.bound, taken, fits)

    @cached_property
    def changes(self) -> list[Change]:
        batch = self.query.batches[0]
        seconds = self.point(batch).seconds
        changes = [
            self._change(v.name, dict(v.options), v.trained, v.recipe, batch, seconds)
            for v in variants_of(self.recipe, self.machine.kind)
        ]
        return [change for change in changes if self._differs(change)]

    def _differs(self, change: Change) -> bool:
        """False for a variant without effect, such as a window as long as the context."""
        before = self.memory.state_per_sequence
        return abs(change.gain - 1) > NOTHING or abs(change.state_bytes - before) > NOTHING * before

    def _change(
        self, name: str, options: dict[str, str], trained: bool, recipe: Recipe, batch: int, own: float
    ) -> Change:
        metered, context = recipe.metered(), self.query.context
        line = DecodeLine(metered, context)
        arithmetic = _arithmetic(self.machine, recipe, metered)
        timing = arithmetic.timing(line.cost(batch))
        weights, state = weight_bytes(recipe), sequence_bytes(metered.layout, context)
        room = self.machine.memory
        most = None if room is None or not state else max(0, (room - weights - self.memory.step) // state)
        return Change(
            name,
            options,
            trained,
            weights,
            state,
            timing.seconds,
            own / timing.seconds,
            arithmetic.turning_batch(line),
            most,
            timing.bound,
        )

    @cached_property
    def speculation(self) -> GainForecast | None:
        """The predicted gain of the drafter, at the machine's limits."""
        if self.drafter is None:
            return None
        times = DraftTimes(self._seconds_of, self._seconds_of, lambda cost: self.arithmetic.timing(cost).seconds)
        return forecast_of(self.drafter, self.recipe, self.machine.kind, times, self.query.context)

    @property
    def speculation_batches(self) -> list[int]:
        return sorted({*BATCHES, *self.query.batches})

    def _seconds_of(self, recipe: Recipe) -> Seconds:
        metered = recipe.metered()
        form, arithmetic = closed_form(metered), _arithmetic(self.machine, recipe, metered)
        return lambda step: arithmetic.timing(form.cost(step)).seconds

    def as_json(self) -> dict[str, Any]:
        forecast = self.speculation
        more = {} if forecast is None else {"speculation": forecast.as_json(self.speculation_batches)}
        return {
            "model": self.recipe.config.get("model_type"),
            "parameters": self.metered.parameters,
            "dtype": self.recipe.dtype_name,
            "activations": self.recipe.activations.name,
            "kv_dtype": pages_name(self.recipe.kv_dtype),
            "machine": self.machine.as_json(),
            "peak_flops": self.arithmetic.peak if self.arithmetic.measured else None,
            "phases": [phase.as_json() for phase in self.phases],
            "memory": self.memory.as_json(),
            "context": self.query.context,
            "turning_batch": self.turning_batch,
            "linear_turning_batch": self.linear_turning_batch,
            "curve": [asdict(point) for point in self.curve],
            "variants": [change.as_json() for change in self.changes],
            **more,
        }


def _arithmetic(machine: TargetMachine, recipe: Recipe, metered: MeteredModel) -> Arithmetic:
    return Arithmetic(machine, recipe.dtype_name, metered.cost(StepShape.decode()).sum())


def numbers(text: str, what: str) -> tuple[int, ...]:
    """Parse comma-separated integers: "1,8,32"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{what} is {text[:40]!r}; give whole numbers separated by commas.") from None
