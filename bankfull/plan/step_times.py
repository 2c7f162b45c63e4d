"""Predicted step times: a roofline with one efficiency factor per kind of operation and bound.

Costs come from the model's closed form, so that a step is evaluated in microseconds. Two times are computed. The
shortest time is the physical limit: weights and state are read once at the bandwidth of a working set of that size, or
the arithmetic runs at its peak; activations may stay in a cache and are not counted. The likely time sums the kinds of
operations, each at its calibrated fraction of the ceiling, plus a fixed cost per step and per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.closed_form import ClosedForm, Shares, Windows, experts_used, features
from bankfull.limits.meter.metered import HEAD
from bankfull.limits.meter.step import StepShape
from bankfull.ops.attention.sight import seen_by_one
from bankfull.ops.cost import NUMBERS, Cost, Rates, seconds_per_number
from bankfull.plan.layouts import FIXED_FEATURES, ParallelLayout
from bankfull.types import Work

LINEAR, HEAD_LINEAR, ATTENTION, SCAN, REST = "linear layers", "head", "attention", "scan", "other operations"
KINDS = (LINEAR, HEAD_LINEAR, ATTENTION, SCAN, REST)
BY_ROW = (ATTENTION, SCAN)
"""Kinds that process each sequence separately: decode and prefill sequences have different bottlenecks."""
DECODE, PREFILL = "decode", "prefill"
MEMORY, ARITHMETIC = "memory", "arithmetic"
OVERHEAD, EXCHANGE = "overhead of steps and sequences", "collectives between devices"
NOTHING = [[0.0] * len(KINDS)] * 4
DIVIDED = {LINEAR: "weights", HEAD_LINEAR: "weights", ATTENTION: "attention", SCAN: "recurrent", REST: "rest"}
"""How a layout divides a kind."""

RECURRENT = frozenset(
    (
        "causal_conv",
        "causal_conv_silu",
        "selective_scan",
        "ssd_scan",
        "diagonal_scan",
        "linear_attention",
        "delta_rule",
    )
)


def kind_of(operation: str) -> str:
    """Kind of an operation by its name in a ledger."""
    if operation.startswith(f"{HEAD}/"):
        return HEAD_LINEAR
    if operation in RECURRENT:
        return SCAN
    if "linear" in operation or "expert" in operation or operation in ("absorb_queries", "head_products"):
        return LINEAR
    return ATTENTION if operation in ("paged_attention", "attend", "latent_attention") else REST


def _terms() -> tuple[str, ...]:
    names = []
    for kind in KINDS:
        for part in (f"{kind}, {DECODE}", f"{kind}, {PREFILL}") if kind in BY_ROW else (kind,):
            names += [f"{part}: {MEMORY}", f"{part}: {ARITHMETIC}"]
    return tuple(names)


TERMS = _terms()
"""Kinds of operations and their bounds; each has one efficiency factor."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the ceilings that are reached, and fixed costs."""

    factors: Mapping[str, float]
    """Term -> factor, above 0 and at most 1."""
    step_seconds: float
    sequence_seconds: float
    source: str
    assumed: bool

    @property
    def slowdowns(self) -> np.ndarray:
        return np.array([1 / self.factors[term] for term in TERMS])


HEAD_TERMS = [TERMS.index(f"{HEAD_LINEAR}: {bound}") for bound in (MEMORY, ARITHMETIC)]


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Times of one step on the busiest ranks."""

    terms: np.ndarray
    """Likely seconds by term."""
    exchange: float
    """Likely seconds of collectives."""
    least: float


@dataclass(slots=True)
class TimeBreakdown:
    """Seconds by term, summed over steps."""

    terms: np.ndarray = field(default_factory=lambda: np.zeros(len(TERMS)))
    overhead: float = 0.0
    """Fixed costs of steps and sequences."""
    exchange: float = 0.0
    least: float = 0.0
    steps: int = 0
    prefill: float = 0.0
    """Seconds of the steps with prefill."""

    @property
    def seconds(self) -> float:
        return float(self.terms.sum()) + self.overhead + self.exchange

    def add(self, other: TimeBreakdown) -> None:
        self.terms += other.terms
        self.overhead += other.overhead
        self.exchange += other.exchange
        self.least += other.least
        self.steps += other.steps
        self.prefill += other.prefill

    def shares(self) -> dict[str, float]:
        """Shares of all seconds, largest first."""
        whole = self.seconds or 1.0
        named = dict(zip(TERMS, (self.terms / whole).tolist(), strict=True))
        named |= {OVERHEAD: self.overhead / whole, EXCHANGE: self.exchange / whole}
        return {name: share for name, share in sorted(named.items(), key=lambda item: -item[1]) if share > 0}


class StepTimes:
    """Step times of one model with one storage on one device."""

    def __init__(
        self,
        forms: Mapping[str, ClosedForm],
        ceilings: Ceilings,
        rates: Rates,
        efficiency: Efficiency,
        overlaps: bool = False,
        layout: ParallelLayout | None = None,
    ) -> None:
        """`forms`: by operation, from `forms_by_operation`. `overlaps`: whether memory and arithmetic overlap, as on a
        GPU; they do not on the threads of a CPU. `layout`: over several devices; None = one."""
        any_form = next(iter(forms.values()))
        self.windows: Windows = any_form.windows
        self.shares: Shares = any_form.shares
        self.block = any_form.block
        self.ceilings, self.rates, self.efficiency = ceilings, rates, efficiency
        self.overlaps, self.layout = overlaps, layout
        width = FIXED_FEATURES + 2 * len(self.windows) + len(self.shares)
        # A likely time needs a rate even for unmeasured arithmetic: the fastest measured one, scaled by the factors.
        self._likely_rates = _measured(rates, max(ceilings.flops.values()))
        likely, shortest = (np.array(seconds_per_number(known)) for known in (self._likely_rates, rates))
        arithmetic, kept, passing, least = (np.zeros((width, len(KINDS))) for _ in range(4))
        whole = np.zeros(NUMBERS)
        for operation, form in forms.items():
            column = KINDS.index(kind_of(operation))
            arithmetic[:, column] += form.coefficients @ likely
            least[:, column] += form.coefficients @ shortest
            whole += np.abs(form.coefficients).sum(0)
            moved = form.coefficients[:, 1] + form.coefficients[:, 2]
            lasting = _lasting(width, len(self.windows))
            kept[lasting, column] += moved[lasting]
            passing[~lasting, column] += moved[~lasting]
        if Cost(*whole).peak(rates) == math.inf:
            least[:] = 0.0  # no bound is known
        if layout is not None:
            for column, kind in enumerate(KINDS):
                lasting, every = layout.divisors(width, len(self.windows), DIVIDED[kind])
                for table, divisor in ((arithmetic, every), (kept, lasting), (passing, every), (least, every)):
                    table[:, column] /= divisor
        self._coefficients = np.concatenate((arithmetic, kept, passing, least), axis=1)
        self._slowdowns = efficiency.slowdowns
        self._passing_rate = max(ceilings.cached_read_bytes_per_s, ceilings.read_bytes_per_s)

    def arithmetic(self, cost: Cost) -> float:
        """Seconds of arithmetic at the ceilings, as in a likely time."""
        return cost.arithmetic(self._likely_rates)

    def least(self, step: StepShape) -> float:
        """Shortest time on these ceilings."""
        decoding, prefill = self._features(step)
        return self._run(decoding, prefill, len(step.counts), step.tokens).least

    def likely(self, step: StepShape) -> float:
        return self.spent(step).seconds

    def spent(self, step: StepShape) -> TimeBreakdown:
        """Where the likely time of a step goes."""
        breakdown = TimeBreakdown()
        self.charge(*self._features(step), len(step.counts), step.tokens, breakdown)
        return breakdown

    def terms(self, step: StepShape) -> np.ndarray:
        """Seconds at the ceilings, by term."""
        return self._ideal(*self._features(step))[0]

    def _features(self, step: StepShape) -> tuple[np.ndarray, np.ndarray]:
        return features_of(step, self.windows, self.shares, self.block)

    def work(self, work: Sequence[Work], spent: TimeBreakdown) -> float:
        """Likely seconds of a planned step, which are added to `spent`."""
        decoding, prefill = features_of_work(work, self.windows, self.shares, self.block)
        return self.charge(decoding, prefill, len(work), sum(w.count + w.drafts for w in work), spent)

    def decodes(self, work: Sequence[Work]) -> Iterator[TimeBreakdown]:
        """Times of plain decode steps, one after the other; `work`: that of the first. No window cuts a sequence."""
        decoding, prefill = features_of_work(work, self.windows, self.shares, self.block)
        while True:
            spent = TimeBreakdown()
            self.charge(decoding, prefill, len(work), len(work), spent)
            yield spent
            decoding[FIXED_FEATURES : FIXED_FEATURES + 2 * len(self.windows)] += len(work)

    def charge(
        self, decoding: np.ndarray, prefill: np.ndarray, sequences: int, tokens: int, spent: TimeBreakdown
    ) -> float:
        run = self._run(decoding, prefill, sequences, tokens)
        overhead = self.overhead(sequences)
        seconds = float(run.terms.sum()) + overhead + run.exchange
        spent.terms += run.terms
        spent.overhead += overhead
        spent.exchange += run.exchange
        spent.least += run.least
        spent.steps += 1
        if prefill[2] > 0:
            spent.prefill += seconds
        return seconds

    def _run(self, decoding: np.ndarray, prefill: np.ndarray, sequences: int, tokens: int) -> RankTimes:
        """Times of a step on the layout, with the number of micro-batches that is fastest."""
        layout = self.layout
        if layout is None:
            ideal, least = self._ideal(decoding, prefill)
            return RankTimes(ideal * self._slowdowns, 0.0, least)
        possible: list[RankTimes] = []
        rows = float(decoding[3] + prefill[3])
        whole, _ = self._ideal(decoding, prefill)
        for micro in layout.micro_batches(sequences):
            parts = [layout.micro_batch(part, micro, tokens, self.shares) for part in (decoding, prefill)]
            ideal, least = self._ideal(*parts)
            turns = layout.turns(micro)
            ideal, least = turns * ideal, turns * least
            ideal[HEAD_TERMS] = whole[HEAD_TERMS]  # the head runs once, after the last micro-batch
            exchange = turns * layout.seconds(tokens / micro, rows / micro)
            possible.append(
                RankTimes(ideal * self._slowdowns, exchange, max(least, layout.least_seconds(tokens, rows)))
            )
        best = min(possible, key=lambda one: float(one.terms.sum()) + one.exchange)
        return replace(best, least=min(one.least for one in possible))

    def overhead(self, sequences: int) -> float:
        """Fixed costs of a step."""
        return self.efficiency.step_seconds + sequences * self.efficiency.sequence_seconds

    def _ideal(self, decoding: np.ndarray, prefill: np.ndarray) -> tuple[np.ndarray, float]:
        """Seconds at the ceilings by term, and the shortest time of the whole step."""
        mixed = prefill[2] > 0
        whole = self._costs(decoding + prefill if mixed else decoding)
        apart = [self._costs(decoding), self._costs(prefill)] if mixed else [whole, NOTHING]
        lasting = sum(whole[1])
        rate = self.ceilings.read_at(lasting)
        seconds: list[float] = []
        for i, kind in enumerate(KINDS):
            for costs in apart if kind in BY_ROW else (whole,):
                # Activations of other kinds grow with their arithmetic, so one factor covers both.
                memory = costs[1][i] / rate + (costs[2][i] / self._passing_rate if kind == REST else 0.0)
                arithmetic = 0.0 if kind == REST else costs[0][i]
                if self.overlaps or (kind in BY_ROW and costs is apart[0]):
                    memory, arithmetic = (memory, 0.0) if memory >= arithmetic else (0.0, arithmetic)
                seconds += (memory, arithmetic)
        return np.maximum(seconds, 0.0), max(lasting / rate, sum(whole[3]))

    def _costs(self, summed: np.ndarray) -> list[list[float]]:
        """Seconds of arithmetic, bytes of weights and state, bytes of activations, and the shortest seconds of
        arithmetic, each by kind."""
        flat = (summed @ self._coefficients).tolist()
        size = len(KINDS)
        return [flat[size * i : size * (i + 1)] for i in range(4)]


def _measured(rates: Rates, otherwise: float) -> Rates:
    """The rates, with `otherwise` in the place of unknown ones."""
    return Rates(*(rate if rate < math.inf else otherwise for rate in astuple(rates)))


def _lasting(width: int, windows: int) -> np.ndarray:
    """Features whose bytes are weights or state: the step (weights), logits (head), sequences and kept states
    (recurrent state), cached tokens, experts used. The others are activations or query-key pairs."""
    mask = np.zeros(width, bool)
    mask[[0, 1, 4, 5]] = True
    mask[FIXED_FEATURES + 1 : FIXED_FEATURES + 2 * windows : 2] = True
    mask[FIXED_FEATURES + 2 * windows :] = True
    return mask


def features_of(
    step: StepShape, windows: Windows, shares: Shares = (), block: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Features of the decoding sequences, with those that occur once per step, and features of the prefill ones."""
    prefill = [i for i, count in enumerate(step.counts) if count > 1]
    whole = features(step, windows, shares, block)
    if not prefill:
        return whole, np.zeros(len(whole))
    part = StepShape(
        tuple(step.counts[i] for i in prefill),
        tuple(step.lengths[i] for i in prefill),
        0,
        tuple(step.kept[i] for i in prefill),
    )
    prefilling = features(part, windows, shares, block)
    prefilling[0] = 0
    return whole - prefilling, prefilling


def features_of_work(
    work: Sequence[Work], windows: Windows, shares: Shares = (), block: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """`features_of` for a planned step; decoding sequences are summed in one operation."""
    ones = [w for w in work if w.count + w.drafts == 1]
    many = [w for w in work if w.count + w.drafts != 1]
    logits = sum(w.lines for w in work)
    decoding = np.zeros(FIXED_FEATURES + 2 * len(windows) + len(shares))
    decoding[0], decoding[1] = 1, int(logits > 0)
    decoding[2], decoding[3], decoding[4], decoding[5] = len(ones), logits, len(ones), len(ones)
    if ones and windows:
        starts = np.array([w.start for w in ones])
        for i, window in enumerate(windows):
            seen = float(seen_by_one(starts, window).sum())
            decoding[FIXED_FEATURES + 2 * i : FIXED_FEATURES + 2 * i + 2] = seen
    routed = FIXED_FEATURES + 2 * len(windows)
    decoding[routed:] = experts_used(len(ones), shares)
    if not many:
        return decoding, np.zeros(len(decoding))
    prefill = features(StepShape.of(many), windows, shares, block)
    prefill[0] = prefill[1] = prefill[3] = 0
    # Both read experts together: decoding is charged with those that the prompts do not use.
    decoding[routed:] = experts_used(sum(w.count + w.drafts for w in work), shares) - prefill[routed:]
    return decoding, prefill
