"""One sequence: its computed tokens catch up with its known tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.state.sequence_state import Parked, SequenceState
from bankfull.state.tiers import Fetch
from bankfull.types import Enter, Finish, Output, Request, Work

Order = tuple[bool, float, int]
"""Batch work last, then the policy's rank, then arrival: smaller runs first and is preempted last. Unique."""


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    child: int
    queued_at: float
    chain: Chain
    tokens: list[int]
    order: Order
    """Kept through preemption; changes only when the policy ranks the sequence again."""
    batch: bool = False
    """Batch work: gets no tokens in a step that carries an online prompt."""
    parent: Sequence | None = None
    """n > 1: the sibling whose prompt pages this one waits to share; None once it is scheduled on its own."""
    children: list[Sequence] = field(default_factory=list)
    """Siblings that wait for this sequence's prompt."""
    computed: int = 0
    """Tokens whose state is settled."""
    flying: deque[Work] = field(default_factory=deque)
    """Work that is launched and not settled, oldest first. Work that is missing here was given up: its result is
    dropped, also when the sequence has meanwhile come back to the same row."""
    start: int = 0
    """Lower bound of the tokens that will be computed once the launched work has settled."""
    sampled: int = 0
    """Launched work that will give at least one token each."""
    drafted: int = 0
    """Launched draft tokens: each may be accepted or not."""
    state: SequenceState | None = None
    """Pages and slots; None while the sequence waits."""
    row: int = -1
    turn: int = -1
    """The last step that served it."""
    admitted: bool = False
    """Whether it has ever had a row."""
    denoised: int = 0
    """Diffusion: steps since it got its row."""
    cached: int = 0
    """Prompt tokens found in the prefix cache at its first admission."""
    entered: int = 0
    """Known tokens when it got its row."""
    fruitless: int = 0
    """Times in a row that it was preempted without a new token."""
    parked: Parked | None = None
    """The state that it had when it was preempted; None while it runs."""
    fetch: Fetch | None = None
    """Its prefix, on the way from a lower tier."""
    swapped: bool = False
    """Whether its parked state was considered for the host."""
    sought: bool = False
    """Whether lower tiers were asked for its prefix since it began to wait."""
    kept: int = 0
    """Prefixes of `Request.keeps` that were pinned, or could not be."""
    blocked: float = 0.0
    """Seconds that it waited behind others so far (`sched.blocked`)."""
    blocked_since: float | None = None
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt)

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def scored(self) -> bool:
        """Whether its next token needs logits although it is not the last one (prompt logprobs)."""
        return self.request.scored and self.start < self.prompt_len - 1

    @property
    def known(self) -> int:
        """Lower bound of the tokens that will be known once the launched work has settled."""
        return len(self.tokens) + self.sampled

    @property
    def missing(self) -> int:
        """Known tokens that no launched work computes. Drafts in flight move both bounds alike, so this is exact."""
        return len(self.tokens) + self.sampled - self.start

    def launch(self, work: Work) -> None:
        self.flying.append(work)
        self.start += work.count - work.redone
        self.denoised += 1
        self.drafted += work.drafts
        self.sampled += work.sample

    def land(self, accepted: int) -> None:
        """The oldest launched work has settled with `accepted` drafts."""
        work = self.flying.popleft()
        self.computed += work.count - work.redone + accepted
        self.start += accepted
        self.drafted -= work.drafts
        self.sampled -= work.sample

    def fail(self, error: str, step: int, tokens: list[int], output: Output, state: StateManager) -> None:
        """Drafts behind its end may lead to where no token is left (below 0): that is no error of the sequence."""
        if kept := list(takewhile(lambda token: token >= 0, tokens)):
            settle_sequence(self, step, kept, output, state)
        if output.finish is None:
            output.finish, output.error = Finish.ERROR, error

    def begin(self, row: int, state: SequenceState, computed: int) -> None:
        self.row, self.state, self.computed, self.start, self.denoised = row, state, computed, computed, 0
        self.parked, self.sought, self.swapped, self.entered = None, False, False, len(self.tokens)

    def entry(self, slot: int) -> Enter:
        """What the runner learns of the sequence when it takes its row."""
        request = self.request
        return Enter(
            request.id, self.row, tuple(self.tokens), self.computed, self.prompt_len, self.child, slot, request.payload
        )

    def begin_anew(self, state: StateManager) -> None:
        """Nothing that was kept of it, while it waits, is of the present weights."""
        self.chain, self.sought, self.swapped = state.chain(self.request.salt), False, False

    def give_up(self) -> None:
        """Loses its row and state; the tokens stay, and will be computed again."""
        self.fruitless = 0 if len(self.tokens) > self.entered else self.fruitless + 1
        self.row, self.state, self.computed, self.start, self.sampled, self.drafted = -1, None, 0, 0, 0, 0
        self.flying.clear()


_order = attrgetter("order")


class OrderedSequences(list[Sequence]):
    """Sequences in their order."""

    def enter(self, seq: Sequence) -> None:
        insort(self, seq, key=_order)

    def leave(self, seq: Sequence) -> None:
        del self[bisect_left(self, seq.order, key=_order)]

    def reorder(self, seq: Sequence, order: Order) -> None:
        OrderedSequences.leave(self, seq)
        seq.order = order
        self.enter(seq)


def siblings_of(
    request: Request, state: StateManager, now: float, batch: bool, arrivals: Iterator[int]
) -> list[Sequence]:
    """The sequences of a new request."""
    return [
        Sequence(
            request,
            child,
            now,
            state.chain(request.salt),
            [*request.prompt, *(request.generated[child] if request.generated else ())],
            (batch, 0.0, next(arrivals)),
            batch,
        )
        for child in range(request.samples)
        if child not in request.finished
    ]


def share_of(seq: Sequence, missing: int, budget: int, state: StateManager) -> int:
    """Tokens of `seq` that a step may compute if memory allows; 0 when it has to wait or has enough."""
    request = seq.request
    if request.generates and seq.start + missing >= request.limit:
        return 0  # the token that ends it is already in flight
    size = missing if missing < budget else budget
    if size > 1 and seq.start < seq.prompt_len:
        size = state.cut(seq.start, size, seq.prompt_len, request.keeps)
    if seq.children:
        # Siblings fork where all but the last prompt token has run; until then, this one stops at that point.
        size = min(size, seq.prompt_len - 1 - seq.start)
    return size


def adopt(siblings: list[Sequence]) -> None:
    """The first sibling computes the prompt, the others wait for it."""
    for seq in siblings[:1]:
        seq.parent, seq.children = None, siblings[1:]
    for seq in siblings[1:]:
        seq.parent = siblings[0]


def settle_sequence(seq: Sequence, step: int, tokens: list[int], output: Output, state: StateManager) -> None:
    """Appends the tokens that `seq` keeps, commits its state, and notes in `output` whether it ends."""
    assert seq.state is not None
    request = seq.request
    for token in tokens:
        seq.tokens.append(token)
        output.tokens.append(token)
        if token in request.stop_ids:
            output.finish = Finish.STOP
            break
        if len(seq.tokens) >= request.limit:
            output.finish = Finish.LENGTH
            break
    # Drafts behind an end are not part of the sequence, though the device has accepted them.
    # The state of a denoised block is computed again, now that all its tokens are known.
    verified = tokens and not seq.flying[0].block
    accepted = min(len(tokens) - 1, len(output.tokens)) if verified else 0
    seq.land(accepted)
    # A row that ends may have one more step in flight, which reads the slot that the device has accepted.
    last_use = step if output.finish is None else state.launched
    if state.snapshots is not None:
        state.commit(seq.state, last_use, accepted)
    if seq.computed >= seq.state.border:
        state.publish(seq.state, seq.tokens, seq.computed, seq.prompt_len, request.keeps)
    if seq.kept < len(request.keeps):
        seq.kept = state.pins.settle(request, seq.state.chain, seq.computed, seq.cached, seq.kept)
    if not request.generates and seq.computed >= seq.prompt_len:
        output.finish = Finish.STOP


def unsampled(running: Iterable[Sequence]) -> list[Sequence]:
    """The sequences whose next token is not in flight: the first stage of a pipeline must know it."""
    return [seq for seq in running if not seq.sampled]
