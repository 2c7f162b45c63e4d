"""The thread that runs an engine. Other threads post actions, which run between two steps.

The asyncio engine and the server's engine process run the same loop; they differ in the receiver of its outputs and in
what wakes it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bankfull.frontend import Frontend
from bankfull.outputs import Delta

Action = Callable[[], None]

ACTING_SECONDS, MOST_ACTING_SECONDS = 0.005, 0.02
"""The least and the most time for posted actions between two steps; at least one action runs."""
ACTING_SHARE = 0.1
"""Posted actions may take this fraction of the last step's time, within the two bounds above."""


class Bell(Protocol):
    """Wakes the loop. A ring is remembered until the next wait."""

    def ring(self) -> None:
        """Called from any thread."""
        ...

    def wait(self, seconds: float | None) -> None:
        """Called on the loop's thread: returns when the bell was rung or the time is over; None waits without limit, 0
        returns at once. May return early."""
        ...


class EventBell:
    def __init__(self) -> None:
        self._rung = threading.Event()
        self.ring = self._rung.set

    def wait(self, seconds: float | None) -> None:
        if seconds != 0:
            self._rung.wait(seconds)
        self._rung.clear()


class EngineLoop:
    def __init__(self, front: Frontend, tell: Callable[[list[Delta]], None], bell: Bell | None = None) -> None:
        """`tell` is called after every turn with the new deltas of its step, also when there are none. Every turn waits
        for the bell, for 0 seconds if there is work: the bell may bring work of its own."""
        self._front = front
        front.engine.scheduler.sealed = False  # requests arrive at any time
        self._tell = tell
        self._posted: deque[tuple[str, Action]] = deque()
        self._queues: dict[str, deque[Action]] = {}
        """Posted actions by owner; the owner whose turn is next comes first."""
        self._step_seconds = 0.0
        self._bell = bell or EventBell()
        self._stopping = False

    def post(self, action: Action, owner: str = "") -> None:
        """Called from any thread. Actions of one owner run in the order of posting; owners take turns, so one with a
        thousand actions does not delay the others."""
        self._posted.append((owner, action))
        self._bell.ring()

    def stop(self) -> None:
        """Called from any thread: `run` returns after the current step."""
        self._stopping = True
        self._bell.ring()

    def run(self) -> None:
        while self._wait():
            self._act()
            begun = time.monotonic()
            deltas = self._front.step() if self._front.engine.busy else []
            self._step_seconds = time.monotonic() - begun
            self._tell(deltas)

    def _act(self) -> None:
        """Run posted actions, one of each owner in turn, until their time is over."""
        share = min(MOST_ACTING_SECONDS, max(ACTING_SECONDS, ACTING_SHARE * self._step_seconds))
        ends = time.monotonic() + share
        while self._sorted():
            owner = next(iter(self._queues))
            queue = self._queues.pop(owner)
            action = queue.popleft()
            if queue:
                self._queues[owner] = queue
            action()
            if time.monotonic() >= ends:
                break

    def _sorted(self) -> bool:
        """Sort what was posted by owner; False when there is nothing to do."""
        while self._posted:
            owner, action = self._posted.popleft()
            self._queues.setdefault(owner, deque()).append(action)
        return bool(self._queues)

    def _wait(self) -> bool:
        """Wait for something to do; False when the loop has to stop."""
        due = False
        while not due:
            # Check first, then wait: an action that is posted in between has rung the bell.
            due = self._due()
            self._bell.wait(0.0 if due else self._pause())
            due = due or self._due()
        return not self._stopping

    def _due(self) -> bool:
        return bool(self._posted or self._queues) or self._stopping or self._runnable()

    def _runnable(self) -> bool:
        engine = self._front.engine
        if not engine.busy:
            return False
        if not engine.scheduler.stuck:
            return True
        wake = engine.wake_at()
        return wake is not None and wake <= time.monotonic()

    def _pause(self) -> float | None:
        wake = self._front.engine.wake_at() if self._front.engine.busy else None
        return None if wake is None else max(0.0, wake - time.monotonic())
