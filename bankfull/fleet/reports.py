"""What an engine reports to its front: its properties once, its load and the changes of its prefix cache step by step.
They are parts of the messages in `serve.engine.wire`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from bankfull.sched.scheduler import Scheduler


class Facts(msgspec.Struct):
    """Properties of the loaded model that the API needs."""

    name: str
    max_len: int
    vocab: int
    rows: int
    pages: int
    page_tokens: int
    step_tokens: int
    dtype: str
    device: str
    ceilings: dict[str, float] | None = None
    """The machine's read_bytes_per_s and flops for this model, if they were measured before; without flops where the
    model's arithmetic could not be measured."""
    groups: list[tuple[int, int]] = []
    """Tokens per page and window of each page group; window 0: all tokens stay live. Empty: one group without a window,
    or none for a model with only recurrent state."""
    snapshots: int = 0
    """Recurrent state is reusable only at multiples of this many tokens; 0: no recurrent state."""
    weights: str = ""
    """Fingerprint of the weights (`weights.fingerprint`): a request that has tokens of some weights must not continue
    with others. Empty without replicas and without a response cache."""
    state: dict[str, str] = {}
    """What the numbers in its K/V pages depend on: engines that differ in it cannot hand pages to each other. Empty
    without separation."""
    static_batch: int = 0
    """Requests that start together: a request waits until so many are there. 0: none waits for others."""
    exchange_at: tuple[str, int] | None = None
    """Address at which the engine takes pages from other engines; None: it takes none, or through shared memory."""
    optional: dict[str, str] = {}
    """Optional parts that were asked for: why each is not used, in a few words without names of files, or nothing."""


class TierLoad(msgspec.Struct, array_like=True):
    """A tier below the device."""

    tier: str
    bytes_used: int
    bytes_total: int
    written: int
    """Bytes copied to it so far."""
    read: int
    failed: int
    """Transfers that failed so far."""


class MoveLoad(msgspec.Struct, array_like=True):
    """Decisions about state below the device, and about preempted sequences, so far. Seconds are predictions."""

    fetches: int
    fetched_tokens: int
    fetch_seconds: float
    saved_seconds: float
    refused: int
    late: int
    parked: int
    park_seconds: float
    recomputed: int
    recompute_seconds: float


class Load(msgspec.Struct, array_like=True):
    """The engine's state after a step, for metrics and admission."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
    busy: float
    """Seconds inside steps so far."""
    bytes_moved: float
    flops: float
    """Bytes and operations of all steps so far, by the cost model; 0 where this machine was never measured."""
    decode_busy: float = 0.0
    decode_bytes: float = 0.0
    decode_flops: float = 0.0
    """The same three for pure decode steps; all other steps also computed prompts."""
    prefill_ms_per_token: float = 0.0
    """Milliseconds per prompt token, from the last steps; 0 if not measured, or not asked for."""
    step_ms: float = 0.0
    """Milliseconds of a decode step with one more row than now, from the last steps; 0 likewise."""
    pages_cached: int = 0
    """Unused pages that hold cached prefixes; 0 if not asked for."""
    drafted: list[int] = []
    accepted: list[int] = []
    """Draft tokens that were verified and accepted so far, by their position after a known token."""
    sampled: int = 0
    """Tokens generated so far."""
    tiers: list[TierLoad] = []
    moves: MoveLoad | None = None
    """None where there is no tier below the device."""
    pins: int = 0
    """Pinned prefixes."""
    pinned_places: int = 0
    """Pages and snapshots that pins hold, on all tiers."""
    pins_given_up: int = 0
    """Pins given up so far because a sequence lacked memory."""
    pins_over_share: int = 0
    """Pins dropped, or not made, so far, because pins hold their share of the memory."""
    queues: list[float] = []
    """Milliseconds of quanta that the sequences of each queue have left, for a policy with queues; else empty."""
    quantum_ms: float = 0.0
    """Quantum of its first queue; each next one is twice as long."""
    optional: dict[str, str] = {}
    """Optional parts as in `Facts`, as they are now."""


class PrefixChanges(msgspec.Struct, array_like=True):
    """Keys of the prefix cache that became available or were evicted: little-endian, 8 bytes each. They are the first
    bytes of salted SHA-256 hashes (`state.prefix`), so that they reveal nothing about the tokens."""

    added: bytes
    dropped: bytes
    reset: bool
    """The reader must forget all keys first: `added` holds all there are, at most 65,536."""


def routing_figures(scheduler: Scheduler) -> tuple[float, float, int]:
    """The fields of `Load` for routing: prefill_ms_per_token, step_ms and pages_cached. The pace must be measured."""
    token, step = scheduler.pace.token_seconds(False), scheduler.pace.decode_seconds(scheduler.running + 1)
    return 1e3 * (token or 0.0), 1e3 * step, scheduler.state.pages.cached


def queue_figures(scheduler: Scheduler) -> tuple[list[float], float]:
    """The fields of `Load` for a policy with queues."""
    queues = [1e3 * seconds for seconds in scheduler.policy.backlog()]
    return queues, scheduler.config.quantum_ms if queues else 0.0


def optional_parts(scheduler: Scheduler) -> dict[str, str]:
    """The field `optional` of `Facts` and `Load`."""
    state = scheduler.state
    problems = dict(state.without)
    if state.tiers is not None:
        problems |= {f"kv_{tier.tier.name.lower()}": tier.problem for tier in state.tiers.lasting}
    return problems


def joined_optional(each: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The same for several engines: a part that one of them cannot use has that one's problem."""
    joined: dict[str, str] = {}
    for one in each:
        for part, problem in one.items():
            joined[part] = joined.get(part) or problem
    return joined


def tier_figures(scheduler: Scheduler) -> tuple[list[TierLoad], MoveLoad | None]:
    """The fields of `Load` for tiers."""
    tiers = scheduler.state.tiers
    if tiers is None:
        return [], None
    loads = [
        TierLoad(
            tier.tier.name.lower(),
            *tiers.bytes_in(tier),
            tier.traffic.written,
            tier.traffic.read,
            tier.traffic.failed,
        )
        for tier in tiers.lower
    ]
    counts = scheduler.parking.counts
    return loads, MoveLoad(**{field.name: getattr(counts, field.name) for field in fields(counts)})
