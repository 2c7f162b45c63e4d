"""Routing: which replica serves a request. Policies are pure: they see one `Candidate` per replica and return an index.

`prefix`, the default, minimizes predicted milliseconds: the time until the first token, the time that decoding takes
longer beside other streams, and the delay that the request's prefill causes to others. It delays the streams that run
there now, and where the cache is full it evicts prefixes that later requests must compute again. A session stays where
its prefix is cached, because any other replica would compute it again, and leaves a replica whose queue or streams cost
more than that. Nothing else makes sessions stick. A prefix that all requests share spreads by the same rule: once the
replica that holds it is busy enough, another one is faster although it must compute the prefix first, and holds it from
then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, cast

from bankfull.errors import ConfigError
from bankfull.fleet.reports import Load

if TYPE_CHECKING:
    import numpy as np

DEFAULT_PREFILL_MS = 0.5
"""Assumed milliseconds of prefill per prompt token while no replica has measured its own."""
DEFAULT_STEP_MS = 25.0
"""Assumed milliseconds of a decode step while no replica has measured its own."""
DEFAULT_STEP_TOKENS = 512
"""Assumed tokens of a step for a replica that does not report them."""
STREAM_WEIGHT = 0.5
"""Weight of a millisecond by which a running stream is delayed, relative to one before the first token."""
SHARING_WEIGHT = 0.5
"""How much longer a stream is taken to last at a replica whose rows are all in use than at an idle one, as a share of
its measured time. Without it, requests with one short prompt would all go to the replica that holds it, and none to one
that was added because the first was too slow."""
EVICTION_WEIGHT = 2.0
"""Delay of later requests for each millisecond of prefill into a full cache: the evicted prefixes are computed again,
and requests queue behind that. On the multi-turn traffic of `benchmarks.routing` (seeds 0 to 2) prefix routing reaches
88 to 92% of one large cache's hits with 0, and 97 to 98% with 2."""
TIE_MS = 0.1
"""Predictions are compared in steps of this many milliseconds; smaller differences are noise."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could serve a request, as the front knows it."""

    load: Load | None = None
    """Load after its last step; None before the first one."""
    cached_tokens: int = 0
    """Tokens of the request's prompt that its prefix cache holds."""
    prefill_ms_per_token: float = 0.0
    """Measured milliseconds per prompt token; 0 before any was measured."""
    step_ms: float = 0.0
    """Measured milliseconds of a decode step with its present rows; 0 before any was measured."""
    inflight_tokens: int = 0
    """Prompt tokens of online requests that it still has to compute: queued or in prefill, without cached ones."""
    rows: int = 0
    """Sequences that it runs at once; 0 if unknown."""
    inflight: int = 0
    """Samples of online requests that were sent to it and have not ended."""
    batch_inflight: int = 0
    """Samples of batch requests that were sent to it and have not ended."""
    step_tokens: int = 0
    """Tokens of a step at most; 0 if unknown."""
    row_ms: float = 0.0
    """Measured milliseconds from a request's first token to its end; 0 before any was measured."""

    @property
    def fullness(self) -> float:
        return fullness_of(self.load)

    @property
    def running(self) -> int:
        return self.load.running if self.load is not None else 0

    @property
    def online(self) -> int:
        return online_of(self.load, self.inflight, self.batch_inflight)


def fullness_of(load: Load | None) -> float:
    """Fraction of a replica's pages that hold anything; an unused one can be filled without an eviction."""
    if load is None or not load.pages_total:
        return 0.0
    return min(1.0, (load.pages_used + load.pages_cached) / load.pages_total)


def online_of(load: Load | None, inflight: int, batch_inflight: int) -> int:
    """Online samples in flight at a replica, those of other fronts included."""
    reported = load.running + load.waiting if load is not None else 0
    return max(inflight, reported - batch_inflight)


class RoutingPolicy(Protocol):
    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        """The index of the replica for a request; there is at least one candidate."""
        ...


def first_token_ms(prompt_tokens: int, replica: Candidate) -> float:
    """Predicted milliseconds until the first token, with the replica's own rates: wait for the running step and for a
    row, the prefill of the queue, the prefill of the prompt, and the decodes that share these steps."""
    uncached = max(1, prompt_tokens - replica.cached_tokens)
    work = uncached + replica.inflight_tokens
    wait = 0.0
    if replica.running:
        steps = math.ceil(work / (replica.step_tokens or DEFAULT_STEP_TOKENS))
        wait = (0.5 + steps) * replica.step_ms
    if replica.rows and replica.online >= replica.rows:
        wait += (replica.online - replica.rows + 1) * replica.row_ms / replica.rows
    return wait + work * replica.prefill_ms_per_token


def others_delay_ms(prompt_tokens: int, replica: Candidate) -> float:
    """Predicted milliseconds by which the prompt's prefill delays other requests: streams that run there, and later
    requests whose cached prefixes it evicts."""
    prefill = max(1, prompt_tokens - replica.cached_tokens) * replica.prefill_ms_per_token
    return prefill * (STREAM_WEIGHT * replica.running + EVICTION_WEIGHT * replica.fullness)


def sharing_ms(replica: Candidate) -> float:
    """Predicted milliseconds by which the request's stream is slower beside those that run there."""
    if not replica.rows:
        return 0.0
    return SHARING_WEIGHT * replica.row_ms * min(1.0, replica.online / replica.rows)


def predicted(prompt_tokens: int, replica: Candidate) -> float:
    """What a replica costs in milliseconds, with its own rates."""
    return first_token_ms(prompt_tokens, replica) + others_delay_ms(prompt_tokens, replica) + sharing_ms(replica)


def with_rates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The same candidates; those without measured rates get the median of the others', or the defaults. A replica that
    has just started serves the same model, and must look neither free nor hopeless."""
    candidates = list(candidates)  # a table makes them anew each time that they are read
    prefill = [c.prefill_ms_per_token for c in candidates if c.prefill_ms_per_token > 0]
    step = [c.step_ms for c in candidates if c.step_ms > 0]
    row = [c.row_ms for c in candidates if c.row_ms > 0]
    if len(prefill) == len(step) == len(candidates) and len(row) in (0, len(candidates)):
        return candidates
    usual_prefill = median(prefill) if prefill else DEFAULT_PREFILL_MS
    usual_step = median(step) if step else DEFAULT_STEP_MS
    usual_row = median(row) if row else 0.0
    return [
        c
        if c.prefill_ms_per_token > 0 and c.step_ms > 0 and (c.row_ms > 0 or not row)
        else replace(
            c,
            prefill_ms_per_token=c.prefill_ms_per_token or usual_prefill,
            step_ms=c.step_ms or usual_step,
            row_ms=c.row_ms or usual_row,
        )
        for c in candidates
    ]


NAMES = (
    "running",
    "fullness",
    "online",
    "batch_inflight",
    "inflight_tokens",
    "prefill_ms_per_token",
    "step_ms",
    "row_ms",
    "rows",
    "step_tokens",
)
"""Figures of a candidate that the policies use, by the names of its fields."""
FEW = 24
"""Up to this many candidates a loop is faster than arrays."""


class ByColumn(Protocol):
    """Candidates that can be read as columns, one numpy array per figure."""

    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]: ...

    def cached(self) -> np.ndarray[Any, Any]: ...


def by_column(candidates: Sequence[Candidate]) -> ByColumn | None:
    """The candidates as columns, where they have them and are too many for a loop."""
    return cast(ByColumn, candidates) if len(candidates) > FEW and hasattr(candidates, "columns") else None


def predicted_ms(prompt_tokens: int, candidates: ByColumn) -> np.ndarray[Any, Any]:
    """`predicted` of all candidates, with the rates of `with_rates`: the same operations in
    the same order, so that the sums are equal to the last bit."""
    import numpy as np

    of = candidates.columns()
    prefill = _known(of["prefill_ms_per_token"], DEFAULT_PREFILL_MS)
    step = _known(of["step_ms"], DEFAULT_STEP_MS)
    running, rows, online, tokens = of["running"], of["rows"], of["online"], of["step_tokens"]
    uncached = np.maximum(1.0, prompt_tokens - candidates.cached())
    work = uncached + of["inflight_tokens"]
    if not tokens.all():
        tokens = np.where(tokens > 0, tokens, DEFAULT_STEP_TOKENS)
    wait = (0.5 + np.ceil(work / tokens)) * step
    wait *= running > 0
    full = online >= rows
    row = _known(of["row_ms"], 0.0)
    if full.any() and (full := full & (rows > 0)).any():
        wait += np.where(full, (online - rows + 1) * row / np.maximum(1, rows), 0.0)
    wait += work * prefill
    shared = SHARING_WEIGHT * row * np.minimum(1.0, online / np.maximum(1, rows)) * (rows > 0)
    return wait + uncached * prefill * (STREAM_WEIGHT * running + EVICTION_WEIGHT * of["fullness"]) + shared


def _known(rates: np.ndarray[Any, Any], default: float) -> np.ndarray[Any, Any]:
    """The rates, with the median of the measured ones in the place of those that are missing."""
    import numpy as np

    if rates.all():
        return rates
    measured = rates[rates > 0]
    usual = default
    if len(measured):
        low, high = (len(measured) - 1) // 2, len(measured) // 2
        measured.partition((low, high))
        usual = (measured[low] + measured[high]) / 2
    return np.where(rates > 0, rates, usual)


class _Rotation:
    """Breaks ties in turn, so that equal replicas get equal shares."""

    def __init__(self) -> None:
        self._turn = 0

    def least(self, costs: Sequence[tuple[float, ...]]) -> int:
        best = min(costs)
        first = self._turn % len(costs)
        index = next(i for i in (*range(first, len(costs)), *range(first)) if costs[i] == best)
        self._turn = index + 1
        return index

    def least_of_columns(self, *costs: np.ndarray[Any, Any]) -> int:
        """The index that `least` gives, from one array for each part of the costs."""
        first, *others = costs
        best = (first == first.min()).nonzero()[0]
        for other in others:
            if len(best) > 1:
                among = other[best]
                best = best[among == among.min()]
        at = int(best.searchsorted(self._turn % len(first)))
        index = int(best[at % len(best)])
        self._turn = index + 1
        return index

    def least_online(self, candidates: Sequence[Candidate]) -> int:
        """The index of the replica for batch work, which fills idle replicas: least online work, then least batch work,
        then most cached."""
        if (columns := by_column(candidates)) is not None:
            of = columns.columns()
            return self.least_of_columns(of["online"], of["batch_inflight"], -columns.cached())
        return self.least([(c.online, c.batch_inflight, -c.cached_tokens) for c in candidates])


class PrefixRouting:
    """Fewest predicted milliseconds, by cached prefix and load."""

    def __init__(self, seed: int = 0) -> None:
        self._rotation = _Rotation()

    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        if batch:
            return self._rotation.least_online(candidates)
        if (columns := by_column(candidates)) is not None:
            costs = (predicted_ms(prompt_tokens, columns) / TIE_MS).round()
            return self._rotation.least_of_columns(costs, columns.columns()["online"])
        each = []
        for replica in with_rates(candidates):
            each.append((round(predicted(prompt_tokens, replica) / TIE_MS), replica.online))
        return self._rotation.least(each)


TIE_SHARE = 0.1
"""Predicted completions that differ by a smaller share are equal: measured rates of equal replicas differ as much."""
LASTS_TWICE = 0.5
"""Chance that a request which has used up its quanta so far lasts for the next one, which is as long as all of them."""


def completion_ms(prompt_tokens: int, replica: Candidate, steps: float) -> float:
    """Predicted milliseconds until the last token, under the replica's scheduling policy, of a request that decodes for
    `steps` steps. With queues, it joins the first one whose quantum covers its prefill, and waits for what is left in
    this one and in those before it; for what is left in later queues only if it lasts long enough to get there, and
    its steps are shared with all that are there. Without queues it waits for rows, and then has one for itself."""
    prefill = max(1, prompt_tokens - replica.cached_tokens) * replica.prefill_ms_per_token
    wait, full = 0.0, bool(replica.rows) and replica.online >= replica.rows
    load, decode = replica.load, steps * replica.step_ms
    if full and load is not None and load.quantum_ms:
        chance, quantum = 1.0, load.quantum_ms
        for left in load.queues:
            wait += chance * left / replica.rows
            if quantum >= prefill:
                chance *= LASTS_TWICE
            quantum *= 2
        decode *= (replica.online + 1) / replica.rows
    elif full:
        wait = (replica.online - replica.rows + 1) * decode / replica.rows
    return wait + prefill + replica.inflight_tokens * replica.prefill_ms_per_token + decode


class CompletionRouting:
    """Earliest predicted completion under the scheduling policy, then fewest samples in flight."""

    def __init__(self, seed: int = 0) -> None:
        self._rotation = _Rotation()

    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        if batch:
            return self._rotation.least_online(candidates)
        known = with_rates(candidates)
        # How long requests are is a property of the traffic: a replica that got short ones is not faster for it.
        steps = median([replica.row_ms / replica.step_ms for replica in known])
        costs = [completion_ms(prompt_tokens, one, steps) for one in known]
        near = TIE_MS + (1 + TIE_SHARE) * min(costs)
        return self._rotation.least(
            [(cost > near, one.online, one.inflight_tokens) for cost, one in zip(costs, known, strict=True)]
        )


class RoundRobin:
    """Each replica in turn."""

    def __init__(self, seed: int = 0) -> None:
        self._turn = -1

    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        self._turn += 1
        return self._turn % len(candidates)


class LeastLoaded:
    """Fewest samples in flight, then fewest prompt tokens to compute."""

    def __init__(self, seed: int = 0) -> None:
        self._rotation = _Rotation()

    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        if batch:
            return self._rotation.least_online(candidates)
        if (columns := by_column(candidates)) is not None:
            of = columns.columns()
            return self._rotation.least_of_columns(of["online"], of["inflight_tokens"])
        return self._rotation.least([(c.online, c.inflight_tokens) for c in candidates])


class RandomTwo:
    """The one with fewer samples in flight of two replicas drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        if len(candidates) == 1:
            return 0
        drawn = self._random.sample(range(len(candidates)), 2)
        seen = {i: candidates[i] for i in drawn}
        return min(drawn, key=lambda i: (seen[i].online, seen[i].inflight_tokens))


POLICIES: dict[str, Callable[[int], RoutingPolicy]] = {
    "prefix": PrefixRouting,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "random-two": RandomTwo,
    "completion": CompletionRouting,
}
"""Policies by the name that `--routing` takes; each is made from a seed."""
DEFAULT_POLICY = "prefix"


def routing_policy(name: str = DEFAULT_POLICY, seed: int = 0) -> RoutingPolicy:
    if name not in POLICIES:
        near = get_close_matches(name, POLICIES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(POLICIES)}."
        raise ConfigError(f"The routing policy {name[:40]!r} is unknown; {hint}")
    return POLICIES[name](seed)
