"""A prompt's state on its way from the engine that computes it to the one that decodes.

The decoding engine names places of its exchange for what it lacks, the other engine copies content there as soon as it
is computed, and the decoding engine learns what has arrived. The front passes these messages on; the content itself
goes from engine to engine, through shared memory or a socket. Every wait has a bound: what comes too late is computed
again by the decoding engine.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from bankfull.serve.engine.backend import Unavailable
from bankfull.serve.engine.link import OnRoom, OnShipped
from bankfull.serve.engine.wire import RoomGranted, Shipped
from bankfull.submit import Submit

QUIET_SECONDS = 2.0
"""A request whose prompt is computed waits while state arrives, and so long for the next piece of it."""
LONGEST_SECONDS = 10.0
"""A request whose prompt is computed waits so long for all of its state."""


class StateLink(Protocol):
    """The part of `Link` that moves state between engines."""

    def expect_state(self, prompt: list[int], salt: str, tenant: str, on_room: OnRoom) -> int: ...

    def state_arrived(self, number: int, names: list[bytes]) -> None: ...

    def ship_state(self, on_shipped: OnShipped) -> int: ...

    def ship_more(
        self, number: int, exchange: int, places: list[tuple[bytes, int]], at: tuple[str, int] | None
    ) -> None: ...

    def forget_state(self, number: int, *, told: bool = True) -> None: ...


@dataclass(slots=True)
class TransitCounts:
    """What was handed over so far, for metrics."""

    transits: int = 0
    """Prompts whose state was, at least in part, asked from another engine."""
    pages: int = 0
    """Pages and snapshots that have arrived."""
    nbytes: int = 0
    waited_seconds: float = 0.0
    """Seconds that requests with a first token waited for the rest of their state."""
    late: int = 0
    """Pages and snapshots that had not arrived when their request went on: they were computed again."""
    incomplete: int = 0
    """Requests that went on without all of their state."""
    undivided: int = 0
    """Requests whose prompt the decoding engine has computed itself, because it was short, or because no other engine
    was there."""


class Transit:
    """`source` computes the prompt, `target` decodes; `exchange`: the number of the target's exchange; `at`: where it
    listens, without shared memory."""

    def __init__(
        self,
        source: StateLink,
        target: StateLink,
        exchange: int,
        submit: Submit,
        counts: TransitCounts,
        at: tuple[str, int] | None = None,
    ) -> None:
        self._source, self._target, self._exchange, self._counts = source, target, exchange, counts
        self._submit, self._at = submit, at
        self._coming: dict[bytes, int] = {}
        """Names that have a place, and have not arrived."""
        self._waiting = 0
        self._answered = False
        self._pages = self._bytes = self._late = self._news = 0
        self._waited = 0.0
        self._changed = asyncio.Event()
        self._open, self._ships = True, False
        self.lost = False
        """Whether the target's engine has ended: nothing that has arrived is of use."""
        self.expected = self._order = 0

    def begin(self) -> None:
        """The source computes the prompt from now on: ask the target for places. A prompt that waits needs none, and
        would keep others from theirs."""
        if self.expected or not self._open:
            return
        try:
            self.expected = self._target.expect_state(
                self._submit.prompt, self._submit.salt, self._submit.tenant, self._on_room
            )
        except Unavailable:  # it has just ended
            self.lost = True
            return self.close()
        self._ships = True
        self._order = self._source.ship_state(self._on_shipped)
        self._counts.transits += 1

    @property
    def complete(self) -> bool:
        return not self._open or not self.expected or (self._answered and not self._waiting and not self._coming)

    async def wait(self, most: float = LONGEST_SECONDS) -> None:
        """Wait until all has arrived, or nothing more is to be expected within the bounds."""
        begun = time.monotonic()
        ends = begun + min(most, LONGEST_SECONDS)
        while not self.complete:
            seen, left = self._news, min(QUIET_SECONDS, ends - time.monotonic())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, left))
            if self._news == seen:
                break
        self._waited = time.monotonic() - begun
        self._counts.waited_seconds += self._waited
        self._miss(len(self._coming) + self._waiting)
        self._stop_shipping(told=not self.complete)

    def account(self) -> dict[str, Any]:
        """What has arrived, and what it has cost."""
        return {
            "pages": self._pages,
            "bytes": self._bytes,
            "late_pages": self._late,
            "waited_seconds": self._waited,
        }

    def close(self) -> None:
        """Free both ends."""
        if self._open:
            self._open = False
            self._stop_shipping()
            if self.expected:
                self._target.forget_state(self.expected)
            self._tell()

    def taken(self) -> None:
        """The target runs the request, and has released its end itself."""
        self._open = False
        self._stop_shipping()
        self._target.forget_state(self.expected, told=False)

    def _on_room(self, room: RoomGranted | None) -> None:
        if room is None:
            self.lost = True
            self.close()
            return
        self._answered, self._waiting = True, room.waiting
        if room.withdrawn:
            self._call_back(room.withdrawn)
        if room.places and self._ships:
            self._coming.update(room.places)
            self._source.ship_more(self._order, self._exchange, room.places, self._at)
        self._tell()

    def _on_shipped(self, shipped: Shipped | None) -> None:
        if shipped is None:  # what has arrived stays of use
            self._miss(len(self._coming) + self._waiting)
            self._coming.clear()
            self._answered, self._waiting = True, 0
        else:
            self._target.state_arrived(self.expected, shipped.names)
            for name in (*shipped.names, *shipped.failed):
                self._coming.pop(name, None)
            self._pages += len(shipped.names)
            self._bytes += shipped.nbytes
            self._counts.pages += len(shipped.names)
            self._counts.nbytes += shipped.nbytes
            self._miss(len(shipped.failed))
        self._tell()

    def _call_back(self, names: list[bytes]) -> None:
        """The target has given these places to others: begin the order anew without them."""
        left = [name for name in names if self._coming.pop(name, None) is not None]
        if left and self._ships:
            self._source.forget_state(self._order)
            self._order = self._source.ship_state(self._on_shipped)
            if self._coming:
                self._source.ship_more(self._order, self._exchange, list(self._coming.items()), self._at)

    def _stop_shipping(self, told: bool = True) -> None:
        """What gets a place from now on is not copied any more."""
        if self._ships:
            self._ships = False
            self._source.forget_state(self._order, told=told)

    def _miss(self, pages: int) -> None:
        """So many will not arrive in time."""
        self._counts.incomplete += bool(pages) and not self._late
        self._counts.late += pages
        self._late += pages

    def _tell(self) -> None:
        self._news += 1
        self._changed.set()
        self._changed = asyncio.Event()
