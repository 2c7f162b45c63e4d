"""What bounds a model on a machine: each operation of prefill and decode, the batch at which decoding turns from memory
to arithmetic, what more sequences cost and give, and what other storage or another architecture would change.

All of it is told by the meter from a configuration; no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any

from bankfull.errors import ConfigError
from bankfull.limits.machine.targets import Machine
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import Bound, Roofline, roofline
from bankfull.limits.meter.step import LARGEST_STEP, StepShape
from bankfull.limits.model.memory import Memory, memory_of, sequence_bytes, weight_bytes
from bankfull.limits.model.recipe import Recipe
from bankfull.limits.model.variants import variants_of
from bankfull.ops.cost import Cost
from bankfull.ops.meter import Ledger

MOST_BATCH = 1 << 20
LINEAR = "linear"
"""Part of the names of all operations that multiply with weights."""
NOTHING = 0.02
"""Relative change that is not worth a line."""
LEAST_CURVE, MOST_CURVE = 64, 8192
"""A curve reaches behind what memory holds and behind the turn to arithmetic, but at least and at most so far."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The shortest time of a step on a machine, and what it is bound by."""

    seconds: float
    bound: Bound


class DecodeLine:
    """The cost of decoding at one context as a function of the batch: a straight line, so two meter runs tell all."""

    def __init__(self, metered: MeteredModel, context: int, only: str = "") -> None:
        """`only`: of the operations that have this in their names."""
        one, two = (_sum(metered.cost(StepShape.decode(batch, context)), only) for batch in (1, 2))
        self.each = Cost(two.flops - one.flops, two.read - one.read, two.write - one.write)
        """What one more sequence adds."""
        self.shared = Cost(one.flops - self.each.flops, one.read - self.each.read, one.write - self.each.write)
        """What a step costs whoever takes part: the weights."""

    def cost(self, batch: float) -> Cost:
        return self.shared + self.each * batch


def _sum(ledger: Ledger, only: str) -> Cost:
    return sum((cost for name, cost in ledger.total.items() if only in name), Cost())


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A machine's ceilings as one model meets them."""

    machine: Machine
    dtype: str
    activations: str

    @property
    def peak(self) -> float:
        return self.machine.ceilings.peak_of(self.dtype, self.activations)

    @property
    def measured(self) -> bool:
        return self.peak < inf

    @property
    def doubts(self) -> list[str]:
        """What has to be said beside every time here."""
        unmeasured = self.machine.ceilings.doubt(self.dtype, self.activations)
        return [*self.machine.doubts, *([] if unmeasured is None else [unmeasured])]

    def timing(self, cost: Cost) -> Timing:
        bandwidth = self.machine.ceilings.read_at(cost.read)
        bound: Bound = "arithmetic" if cost.flops / self.peak > cost.bytes / bandwidth else "memory"
        return Timing(cost.seconds(self.peak, bandwidth), bound)

    def turning_batch(self, line: DecodeLine) -> int | None:
        """The smallest batch whose step is bound by arithmetic; None where there is none.

        A step of B sequences takes (shared + B each) bytes / bandwidth for memory and B each FLOP / peak for
        arithmetic. Where one sequence's own bytes already take longer than its arithmetic, no batch turns it.
        """
        ceilings = self.machine.ceilings
        fast = ceilings.read_at(0.0)
        found = _crossing(line, self.peak, fast)
        if found is not None and ceilings.read_at(line.cost(found).read) == fast:
            return found
        return _crossing(line, self.peak, ceilings.read_bytes_per_s)


def _crossing(line: DecodeLine, peak: float, bandwidth: float) -> int | None:
    gain = line.each.flops / peak - line.each.bytes / bandwidth
    if gain <= 0:
        return None
    behind = line.shared.bytes / bandwidth - line.shared.flops / peak
    batch = max(1, ceil(behind / gain))
    while batch > 1 and _is_arithmetic(line.cost(batch - 1), peak, bandwidth):
        batch -= 1
    while not _is_arithmetic(line.cost(batch), peak, bandwidth):
        batch += 1
    return batch if batch <= MOST_BATCH else None


def _is_arithmetic(cost: Cost, peak: float, bandwidth: float) -> bool:
    return cost.flops / peak > cost.bytes / bandwidth


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Decoding with so many sequences at once."""

    batch: int
    seconds: float
    """Of a step: the time per token of each sequence."""
    tokens_per_s: float
    """Of all of them together."""
    bound: Bound
    bytes: int
    """Of memory: weights and state."""
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Phase:
    title: str
    phase: str
    sequences: int
    tokens: int
    context: int
    roofline: Roofline

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
    """A variant beside the model as it is."""

    name: str
    options: dict[str, str]
    trained: bool
    weight_bytes: int
    state_bytes: int
    """Per sequence."""
    seconds: float
    """Of a decode step at the first batch and context."""
    gain: float
    """The model's own time divided by that."""
    turning_batch: int | None
    most_sequences: int | None
    bound: Bound

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Question:
    """Which steps are looked at."""

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
            raise ConfigError(f"A context of {wanted} tokens is more than the {longest} that this model was made for.")


class ModelRoofline:
    """One model on one machine; each part is worked out when it is asked for."""

    def __init__(self, recipe: Recipe, machine: Machine, question: Question) -> None:
        self.recipe, self.machine, self.question = recipe, machine, question
        self.metered = recipe.metered()
        question.fits(self.metered.model.max_positions)
        self.arithmetic = Arithmetic(machine, recipe.dtype_name, recipe.activations)

    @cached_property
    def phases(self) -> list[Phase]:
        prompt = self.question.prompt
        found = [self._phase(f"prefill of {prompt} tokens", "prefill", StepShape.prefill(prompt), prompt)]
        for context in self.question.contexts:
            for batch in self.question.batches:
                title = f"decode, {batch} sequence{'s' * (batch > 1)} at context {context}"
                found.append(self._phase(title, "decode", StepShape.decode(batch, context), context))
        return found

    def _phase(self, title: str, phase: str, step: StepShape, context: int) -> Phase:
        found = roofline(
            self.metered.cost(step), self.machine.ceilings, self.recipe.dtype_name, self.recipe.activations
        )
        return Phase(title, phase, len(step.counts), step.tokens, context, found)

    @cached_property
    def line(self) -> DecodeLine:
        return DecodeLine(self.metered, self.question.context)

    @cached_property
    def turning_batch(self) -> int | None:
        return self.arithmetic.turning_batch(self.line)

    @cached_property
    def linear_turning_batch(self) -> int | None:
        """Of the linear layers alone: what a sequence remembers does not count."""
        return self.arithmetic.turning_batch(DecodeLine(self.metered, self.question.context, LINEAR))

    @cached_property
    def memory(self) -> Memory:
        question, batch = self.question, max(self.question.batches)
        steps = StepShape.prefill(question.prompt), StepShape.decode(batch, question.context)
        largest = max(steps, key=lambda step: step.tokens)
        return memory_of(self.recipe, batch, question.context, largest, self.machine.memory)

    @cached_property
    def curve(self) -> list[CurvePoint]:
        return [self.point(batch) for batch in self._curve_batches()]

    def _curve_batches(self) -> Iterator[int]:
        reach = max(LEAST_CURVE, *self.question.batches, self.turning_batch or 0, self.memory.most_sequences or 0)
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
        batch = self.question.batches[0]
        own = self.point(batch).seconds
        found = [
            self._change(v.name, dict(v.options), v.trained, v.recipe, batch, own)
            for v in variants_of(self.recipe, self.machine.kind)
        ]
        return [change for change in found if self._differs(change)]

    def _differs(self, change: Change) -> bool:
        """A window as long as the context changes nothing."""
        before = self.memory.state_per_sequence
        return abs(change.gain - 1) > NOTHING or abs(change.state_bytes - before) > NOTHING * before

    def _change(
        self, name: str, options: dict[str, str], trained: bool, recipe: Recipe, batch: int, own: float
    ) -> Change:
        metered, context = recipe.metered(), self.question.context
        line = DecodeLine(metered, context)
        arithmetic = Arithmetic(self.machine, recipe.dtype_name, recipe.activations)
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

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.recipe.config.get("model_type"),
            "parameters": self.metered.parameters,
            "dtype": self.recipe.dtype_name,
            "activations": self.recipe.activations,
            "kv_dtype": str(self.recipe.kv_dtype).removeprefix("torch."),
            "machine": self.machine.as_json(),
            "peak_flops": self.arithmetic.peak if self.arithmetic.measured else None,
            "phases": [phase.as_json() for phase in self.phases],
            "memory": self.memory.as_json(),
            "context": self.question.context,
            "turning_batch": self.turning_batch,
            "linear_turning_batch": self.linear_turning_batch,
            "curve": [asdict(point) for point in self.curve],
            "variants": [change.as_json() for change in self.changes],
        }


def numbers(text: str, what: str) -> tuple[int, ...]:
    """ "1,8,32" """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{what} is {text[:40]!r}; give whole numbers with commas between them.") from None
