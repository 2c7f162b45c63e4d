"""What a way to allocate memory wastes, how many sequences it lets run at once, and what that does to throughput.

A traffic runs through continuous batching, first come, first served, once for each allocator. A step computes one token
of every running sequence and as much of the prompts as its budget allows. Its time is assumed: a constant, because a
decode step reads all weights, and a time per token. A sequence that finds no room to grow is preempted, newest first,
and computed again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bankfull.errors import ConfigError
from bankfull.plan.allocators import Allocator, Contiguous, PagedMemory

PARTS = ("used", "reserved for later", "never used", "free, in pieces too small", "free")
"""What becomes of the memory: tokens in it; reserved, and filled later; reserved in vain (internal fragmentation);
free, and enough for the next request if it were one piece (external fragmentation); free."""


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    time: float
    prompt: int
    output: int

    @property
    def final(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWorld:
    """All that is the same for every allocator."""

    capacity: int
    """Tokens whose keys and values fit."""
    longest: int
    """Tokens that a sequence may have."""
    page_tokens: int = 16
    rows: int = 256
    step_tokens: int = 8192
    step_seconds: float = 0.02
    token_seconds: float = 5e-5

    def __post_init__(self) -> None:
        for name in ("capacity", "longest", "page_tokens", "rows", "step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.step_seconds < 0 or self.token_seconds < 0 or not self.step_seconds + self.token_seconds > 0:
            raise ConfigError("The time of a step must be above 0, and no part of it below 0.")
        if self.longest > self.capacity // self.page_tokens * self.page_tokens:
            raise ConfigError(
                f"The memory holds {self.capacity} tokens, and a sequence may have {self.longest}: give more memory, "
                "or a shorter length."
            )

    def allocators(self) -> list[Allocator]:
        longest = self.longest
        return [
            PagedMemory(f"pages of {self.page_tokens}", self.capacity, self.page_tokens),
            Contiguous("contiguous, known length", self.capacity, lambda final: final),
            Contiguous("contiguous, maximum length", self.capacity, lambda final: longest),
        ]


@dataclass(slots=True)
class RunningSequence:
    number: int
    final: int
    known: int
    computed: int = 0


@dataclass(slots=True)
class MemoryOutcome:
    allocator: str
    seconds: float = 0.0
    steps: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    most_sequences: int = 0
    parts: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    """Shares of the memory while requests waited for it, on average over time, in the order of PARTS."""
    sequences: float = 0.0
    """Running sequences, on the same average."""
    waited: float = 0.0
    """Seconds in which requests waited for memory."""
    completion: float = 0.0
    """Mean seconds from a request's arrival to its last token."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self)
        figures["parts"] = dict(zip(PARTS, self.parts, strict=True))
        return {**figures, "tokens_per_second": self.tokens_per_second}


def compare(world: MemoryWorld, requests: Sequence[MemoryRequest]) -> list[MemoryOutcome]:
    for request in requests:
        if request.final > world.longest:
            raise ConfigError(
                f"A request has {request.prompt} + {request.output} tokens, and a sequence may have {world.longest}: "
                "give a longer --max-model-len."
            )
    return [MemorySimulation(world, allocator, requests).run() for allocator in world.allocators()]


class MemorySimulation:
    def __init__(self, world: MemoryWorld, allocator: Allocator, requests: Sequence[MemoryRequest]) -> None:
        self._world, self._allocator, self._requests = world, allocator, requests
        self._coming = deque(sorted(range(len(requests)), key=lambda number: requests[number].time))
        self._waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self._clock = 0.0
        self._outcome = MemoryOutcome(allocator.name)

    def run(self) -> MemoryOutcome:
        outcome = self._outcome
        while self._coming or self._waiting or self.running:
            self._arrive()
            self.step()
        outcome.seconds = self._clock - min((request.time for request in self._requests), default=0.0)
        outcome.completion /= max(1, len(self._requests))
        if outcome.waited:
            outcome.parts = [part / outcome.waited for part in outcome.parts]
            outcome.sequences /= outcome.waited
        return outcome

    def _arrive(self) -> None:
        if not (self._waiting or self.running):
            self._clock = max(self._clock, self._requests[self._coming[0]].time)
        while self._coming and self._requests[self._coming[0]].time <= self._clock:
            number = self._coming.popleft()
            request = self._requests[number]
            self._waiting.append(RunningSequence(number, request.final, request.prompt))

    def step(self) -> None:
        """Admit, compute, and give every complete sequence its next token."""
        self._admit()
        # A token is written when it is computed: a sequence needs room for all that it knows.
        for sequence in list(self.running):
            if sequence in self.running:
                self._make_room(sequence)
        budget = self._world.step_tokens
        computed = 0
        sampling = []
        for sequence in sorted(self.running, key=lambda one: one.known - one.computed > 1):  # decodes first
            chunk = min(sequence.known - sequence.computed, budget - computed)
            sequence.computed += chunk
            computed += chunk
            if chunk and sequence.computed == sequence.known:
                sampling.append(sequence)
        seconds = self._world.step_seconds + computed * self._world.token_seconds
        self._note(seconds, computed)
        self._clock += seconds
        for sequence in sampling:
            sequence.known += 1
            self._outcome.output_tokens += 1
            if sequence.known == sequence.final:
                self.running.remove(sequence)
                self._allocator.end(sequence.number)
                self._outcome.completion += self._clock - self._requests[sequence.number].time

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self._world.rows:
            first = self._waiting[0]
            if not self._allocator.start(first.number, first.known, first.final, len(self.running)):
                return
            self.running.append(self._waiting.popleft())
        self._outcome.most_sequences = max(self._outcome.most_sequences, len(self.running))

    def _make_room(self, sequence: RunningSequence) -> None:
        while not self._allocator.grow(sequence.number, sequence.known):
            newest = self.running.pop()
            self._allocator.end(newest.number)
            newest.computed = 0
            self._waiting.appendleft(newest)
            self._outcome.preemptions += 1
            if newest is sequence:
                return

    def _note(self, seconds: float, computed: int) -> None:
        outcome, allocator = self._outcome, self._allocator
        outcome.steps += 1
        outcome.computed_tokens += computed
        if not self._waiting or len(self.running) >= self._world.rows:
            return
        used = later = vain = 0
        for sequence in self.running:
            reserved = allocator.reserved(sequence.number)
            used += sequence.computed
            later += min(reserved, sequence.final) - sequence.computed
            vain += max(0, reserved - sequence.final)
        first, free = self._waiting[0], allocator.free
        scattered = (
            free if free >= allocator.need(first.known, first.final) and isinstance(allocator, Contiguous) else 0
        )
        shares = (used, later, vain, scattered, free - scattered)
        for index, tokens in enumerate(shares):
            outcome.parts[index] += seconds * tokens / allocator.capacity
        outcome.sequences += seconds * len(self.running)
        outcome.waited += seconds
