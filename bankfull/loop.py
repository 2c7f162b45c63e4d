"""The loop around an engine: one thread runs it and touches it, others post to it what is to be done between two steps.

The asyncio engine and the service's engine process run the same loop and differ in whom they tell.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from bankfull.frontend import Frontend
from bankfull.outputs import Delta

Action = Callable[[], None]


class EngineLoop:
    def __init__(self, front: Frontend, tell: Callable[[list[Delta]], None]) -> None:
        """`tell` is called after every turn, with what its step added, also when that is nothing."""
        self._front = front
        self._tell = tell
        self._inbox: deque[Action] = deque()
        self._news = threading.Condition()
        self._stopping = False

    def post(self, action: Action) -> None:
        """From any thread. Actions run in the order in which they were posted."""
        with self._news:
            self._inbox.append(action)
            self._news.notify()

    def stop(self) -> None:
        """From any thread: `run` returns after the step that is under way."""
        with self._news:
            self._stopping = True
            self._news.notify()

    def run(self) -> None:
        while (actions := self._wait()) is not None:
            for action in actions:
                action()
            self._tell(self._front.step() if self._front.engine.busy else [])

    def _wait(self) -> list[Action] | None:
        """Until there is something to do: what was posted meanwhile; None when the loop is to stop."""
        with self._news:
            while not (self._inbox or self._stopping or self._runnable()):
                self._news.wait(self._pause())
            if self._stopping:
                return None
            actions = list(self._inbox)
            self._inbox.clear()
            return actions

    def _runnable(self) -> bool:
        engine = self._front.engine
        if not engine.busy:
            return False
        wake = engine.wake_at()
        return wake is None or engine.scheduler.running > 0 or wake <= time.monotonic()

    def _pause(self) -> float | None:
        wake = self._front.engine.wake_at() if self._front.engine.busy else None
        return None if wake is None else max(0.0, wake - time.monotonic())
