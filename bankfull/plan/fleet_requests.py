"""What a simulated fleet works on: conversations, requests, and places for replicas."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from bankfull.fleet.attainment import RequestGoals
from bankfull.plan.day import DayConversation
from bankfull.plan.day_content import Content
from bankfull.plan.decode_times import Floats
from bankfull.plan.engine import NO_STEPS
from bankfull.plan.fleet_front import FleetStep
from bankfull.plan.fleet_replica import FleetReplica
from bankfull.state.prefix import Chain
from bankfull.types import Request


@dataclass(slots=True)
class FleetConversation:
    """A conversation that has begun."""

    planned: DayConversation
    content: Content
    chain: Chain
    """Names of its blocks, kept from turn to turn."""
    turn: int = 0
    """Number of the turn that is under way, or comes next."""
    length: int = 0
    """Tokens before that turn."""
    visited: set[int] = field(default_factory=set)
    """Replicas that may hold its blocks."""


@dataclass(slots=True)
class FleetRequest:
    """A request under way."""

    number: int
    conversation: FleetConversation
    prompt: int
    """Tokens of the prompt."""
    output: int
    """Tokens of the answer."""
    arrived: float
    replica: int = -1
    first: float | None = None
    """Time of the first token."""
    newest: float = 0.0
    """Time of the newest token."""
    gap: float = 0.0
    """Longest time between two tokens."""
    cached: int = 0
    """Tokens of the prompt that its first replica had cached."""
    generated: int = 0
    """Tokens that the front had received when its last replica ended."""
    homeless: float | None = None
    """Time at which it lost its replica; None while it has one."""
    goals: RequestGoals | None = None
    """The request's latency objectives, where the autoscaler follows them."""

    def receive(self, now: float, cached: int) -> None:
        """A token has arrived."""
        if self.first is None:
            self.first, self.cached = now, cached
            if self.goals is not None:
                self.goals.tokens(now)
        elif now - self.newest > self.gap:
            self.gap = now - self.newest
        self.newest = now


@dataclass(slots=True)
class FleetMember:
    """One place for a replica, and what it does now. An event of an earlier life is ignored: its `life` is older."""

    number: int
    replica: FleetReplica | None = None
    life: int = 0
    inbox: deque[tuple[Request, FleetConversation]] = field(default_factory=deque)
    """Requests that were sent to it."""
    requests: set[int] = field(default_factory=set)
    ends: Floats = field(default_factory=lambda: NO_STEPS)
    """Ends of the plain steps under way."""
    step: FleetStep | None = None
    """The step of the engine under way."""
    wanted: bool = False
    """Whether it is paid for."""
    draining: bool = False
    restarts: bool = False
    """Whether it starts again after the drain."""
