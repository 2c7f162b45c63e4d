"""The few records that cross rooms. Pure Python: nothing here knows a tensor or a text."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NULL = 0
"""Page and slot 0 of every pool: never handed out. Page 0 pads tables; slot 0 is the all-zero state of a beginning."""


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class Request:
    """What the scheduler needs to know of a request; everything else travels in `payload` to the runner, unread."""

    id: Hashable
    prompt: tuple[int, ...]
    limit: int
    """The most tokens, prompt included, that a sequence of this request may reach."""
    stop_ids: frozenset[int] = frozenset()
    samples: int = 1
    priority: int = 0
    """Lower runs first."""
    salt: bytes = b""
    """Whatever else changes the content of a page: adapter, tenant, ..."""
    tenant: str = ""
    """On whose behalf: tenants share rows, pages and steps evenly, and a priority counts within one tenant only."""
    reuse: bool = True
    """False when every prompt position must really run (prompt logprobs, mean pooling)."""
    generates: bool = True
    """False for requests that end when their prompt has run (scoring, embedding)."""
    scored: bool = False
    """Every prompt position goes through the model's head (prompt logprobs), which takes longer."""
    payload: Any = None


@dataclass(slots=True)  # not frozen: a frozen one takes five times as long to make, for every row of every step
class Work:
    """One sequence's share of a step: `count` known tokens from position `start` on, and `drafts` guesses after them.

    `start` is the host's lower bound when drafts are in flight; the row's true length lives on the device.
    """

    row: int
    start: int
    count: int
    drafts: int = 0
    sample: bool = False
    slots: tuple[int, ...] = ()
    """Where recurrent state is written: after the last 1 + drafts tokens, one slot each. Empty for models without."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies page `src` to page `dst` before the forward pass of its step; both stay pinned until it completes."""

    id: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Enter:
    """A sequence takes a row: its known tokens, how many of them are computed already, and the recurrent slot that its
    first step reads."""

    request: Hashable
    """The id of its request."""
    row: int
    tokens: tuple[int, ...]
    computed: int
    prompt_len: int
    child: int
    slot: int
    payload: Any


@dataclass(frozen=True, slots=True)
class PageEdit:
    """Entries first, first + 1, ... of a row's page table in one group."""

    group: int
    row: int
    first: int
    pages: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """All that the runner is ever told about a step."""

    step: int
    work: list[Work] = field(default_factory=list)
    enter: list[Enter] = field(default_factory=list)
    leave: list[int] = field(default_factory=list)
    pages: list[PageEdit] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(w.count + w.drafts for w in self.work)


@dataclass(slots=True)
class StepResult:
    """What a step gave, in the order of its plan's work."""

    step: int
    tokens: list[list[int]]
    """Accepted drafts, then one sampled token; empty where nothing was sampled."""
    extras: list[Any] = field(default_factory=list)
    """Whatever the request asked for beside tokens (logprobs, pooled states): handed through, unread."""
    errors: dict[int, str] = field(default_factory=dict)
    """Work index -> why this request, and only this one, must end."""
    completed: list[int] = field(default_factory=list)
    """Ids of transfers that are done; possibly of earlier steps."""


@dataclass(slots=True)
class Output:
    """What one settled step means for one sequence."""

    request: Hashable
    child: int
    tokens: list[int]
    finish: Finish | None = None
    error: str | None = None
    extra: Any = None
    cached: int = 0
    """Prompt tokens that were found in the prefix cache when the sequence was first admitted."""
