"""The records that pass between packages. Pure Python: no tensors, no text."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

NULL = 0
"""Page and slot 0 of every pool are never allocated. Page 0 pads page tables; slot 0 is the all-zero initial state."""


Keep = tuple[int, float]
"""A prefix that shall stay in the cache: its tokens, and the seconds since its last use."""


class Finish(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class Request:
    """What the scheduler knows of a request. `payload` passes through to the runner, unread."""

    id: Hashable
    prompt: tuple[int, ...]
    limit: int
    """Maximum tokens of each of its sequences, prompt included."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence."""
    samples: int = 1
    """Sequences to generate (n)."""
    priority: int = 0
    """Lower runs first."""
    salt: bytes = b""
    """Part of every page's hash: requests with different salts share no cached pages."""
    tenant: str = ""
    """Tenants share rows, pages and steps evenly; a priority counts within one tenant only."""
    reuse: bool = True
    """Whether the prefix cache may be used; False if every prompt position must run (prompt logprobs, mean pooling)."""
    generates: bool = True
    """False if the request ends when its prompt has run (scoring, embedding)."""
    scored: bool = False
    """Whether every prompt position needs logits (prompt logprobs), which takes longer."""
    generated: tuple[tuple[int, ...], ...] = ()
    """Tokens that each sample has generated on another engine; empty for a new request. They are computed again like
    those of a preempted sequence, and generation continues after them."""
    finished: frozenset[int] = frozenset()
    """Numbers of the samples that have ended on another engine and do not run."""
    drafts: int | None = None
    """Maximum draft tokens of a step for each of its sequences; None for no limit of its own."""
    lookup: bool | None = None
    """Whether its drafts come only from the host's lookup, or never; None: from what there is."""
    reference: tuple[int, ...] = ()
    """A text that the answer may repeat: draft tokens are looked up in it, too."""
    keeps: tuple[Keep, ...] = ()
    """Prefixes of the prompt that are pinned in the prefix cache, the shortest first."""
    kept: list[int] = field(default_factory=list)
    """Tokens that each of `keeps` newly keeps, without those found in the cache; filled in by the state manager."""
    payload: Any = None


@dataclass(slots=True)  # not frozen: that would take five times as long to construct, for every row of every step
class Work:
    """One sequence's share of a step: `count` known tokens from position `start`, and `drafts` draft tokens after them.

    `start` is the host's lower bound when drafts are in flight; the row's true length lives on the device.
    """

    row: int
    start: int
    count: int
    drafts: int = 0
    sample: bool = False
    """Whether a next token is sampled."""
    slots: tuple[int, ...] = ()
    """Slots that receive the recurrent state after each of the last 1 + drafts tokens; empty for models without
    recurrent state."""
    redone: int = 0
    """Diffusion: tokens whose state a later step computes again. The computed part of the sequence grows by
    count - redone, and by the accepted drafts; where a refresh drops older state, redone is above count."""
    block: int = 0
    """Diffusion: positions after the known tokens whose masked tokens this step predicts; the drafts are the mask
    tokens and partly denoised tokens from there on. 0 = the drafts follow the last known token."""
    first: int = 0
    """Diffusion: the number, within the sequence's tokens of the step, of the one that predicts the block's first
    position."""

    @property
    def lines(self) -> int:
        """Positions whose logits are wanted."""
        return (self.block or self.drafts + 1) if self.sample else 0


class Tier(IntEnum):
    """Tiers where state lies, the fastest first."""

    DEVICE = 0
    HOST = 1
    """Pinned host memory beside a device with memory of its own."""
    EXCHANGE = 2
    """Shared memory into which another engine copies what it has computed for this one."""
    DISK = 3


class TierAddress(NamedTuple):
    """A place of a tier: a page, or a slot where the transfer says so."""

    tier: Tier
    place: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies the content of `src` to `dst`; both stay pinned until its completion is reported. Between two pages of the
    device it happens before the forward pass of its step. Between tiers it happens beside the steps, at any time, and
    may fail."""

    id: int
    src: TierAddress
    dst: TierAddress
    slot: bool = False
    """Whether it copies a recurrent slot instead of a page."""
    key: bytes = b""
    """Name of the content on the disk and in the exchange."""

    @property
    def in_step(self) -> bool:
        return self.src.tier == self.dst.tier == Tier.DEVICE


class Enter(NamedTuple):
    """A sequence takes a row."""

    request: Hashable
    """The id of its request."""
    row: int
    tokens: tuple[int, ...]
    """All known tokens."""
    computed: int
    """Leading tokens whose state exists already."""
    prompt_len: int
    child: int
    """Number of the sample within its request."""
    slot: int
    """The slot whose recurrent state its first step reads."""
    payload: Any


class PageEdit(NamedTuple):
    """New entries of a row's page table in one group, from index `first`."""

    group: int
    row: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that the host expects in a row from `position` on: the row's drafts are those after its newest token."""

    row: int
    position: int
    tokens: tuple[int, ...]

    def drafts(self, known: int, count: int) -> list[int]:
        """The drafts of a row with `known` tokens. Beyond the guess, its last token is repeated: a draft may be
        wrong."""
        first, last = max(0, known - self.position), len(self.tokens) - 1
        return [self.tokens[min(first + i, last)] for i in range(count)]


@dataclass(slots=True)
class StepPlan:
    """Everything that the runner learns about a step."""

    step: int
    work: list[Work] = field(default_factory=list)
    enter: list[Enter] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    """Rows whose sequences have ended or were preempted."""
    pages: list[PageEdit] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    guesses: list[Guess] = field(default_factory=list)
    proposes: int | None = None
    """Drafts per row that the strategy proposes at the end of the step, for the next one; None: as many as it can."""
    drafted: list[int] | None = None
    """Rows that the strategy drafts for: it runs their prompts, too, and proposes for those that sample. None: all."""

    @property
    def tokens(self) -> int:
        """Tokens that the step computes, drafts included."""
        return sum([w.count + w.drafts for w in self.work])


@dataclass(slots=True)
class StepResult:
    """The results of a step, in the order of its plan's work."""

    step: int
    tokens: list[list[int]]
    """Accepted draft tokens, then one sampled token; empty where nothing was sampled."""
    extras: list[Any] = field(default_factory=list)
    """Results beside tokens (logprobs, pooled states), passed on unread."""
    errors: dict[int, str] = field(default_factory=dict)
    """Work index -> the error that ends this request, and only this one."""
    completed: list[int] = field(default_factory=list)
    """Ids of completed transfers, possibly of earlier steps."""
    failed: list[int] = field(default_factory=list)
    """Ids of transfers between tiers that have ended without a result."""
    drafts: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """For rows under a grammar, if there are drafts: row -> tokens and parents of the drafts of its next step."""
    drafting: float = 0.0
    """Seconds of the device in which the strategy has run its own model and proposed drafts."""


@dataclass(slots=True)
class StepDrafts:
    """The drafts of one sequence in one step: its tokens are the accepted drafts, and then the sampled token, which
    stands in the place of the first rejected draft."""

    accepted: int = 0
    rejected: list[int] = field(default_factory=list)
    """Token ids along the rejected path; of a tree, the best one."""
    verified: int = 0
    """Draft tokens that the step verified."""


@dataclass(slots=True)
class Output:
    """The outcome of one settled step for one sequence."""

    request: Hashable
    child: int
    tokens: list[int]
    finish: Finish | None = None
    error: str | None = None
    extra: Any = None
    cached: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first admitted."""
    blocked: float = 0.0
    """Seconds that the sequence waited behind others so far (`sched.blocked`)."""


@dataclass(frozen=True, slots=True)
class CanvasShape:
    """How a diffusion model's sequences are denoised."""

    sight: int
    """Tokens of a block that see each other in attention, aligned to position 0."""
    whole: bool
    """Whether tokens see the whole sequence, whatever `sight` is."""
    block: int
    """Positions that are denoised together."""
    length: int
    """Mask tokens that a sequence sees after its prompt, at most, where tokens see the whole sequence."""
    shifted: bool = False
    """Whether a position's token is predicted from the position before it."""
    cached: bool = False
    """Whether the state of known tokens is kept although later tokens change (lossy)."""
    refresh: int = 0
    """Steps after which such state is computed anew; 0 = never."""
