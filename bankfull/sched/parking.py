"""What is kept for sequences that wait: the state of preempted ones, and prefixes on their way from lower tiers.

A preempted sequence is parked: its state stays in the cache under its own keys, with a copy on the host where that is
cheaper than computing it again. Prefixes are fetched ahead for the sequences that will be admitted soon. A sequence
whose prefix is on its way is not admitted before it has arrived, or has taken far too long; others may overtake it.
What has arrived is held, and is given back if a running sequence needs the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from bankfull.sched.sequence import Sequence
from bankfull.state.lower_tier import Key
from bankfull.state.manager import StateManager

AHEAD = 4
"""Waiting sequences whose prefixes are fetched, beyond those that free rows could admit."""
LATE_FACTOR, LATE_SECONDS = 4.0, 1.0
"""A fetch that takes longer than this multiple of its prediction, and than this time, is no longer waited for."""


class Prices(Protocol):
    def prefill(self, start: int, end: int) -> float | None:
        """Predicted seconds to compute the tokens from `start` to `end` of one sequence; None if nothing is known."""
        ...


@dataclass(slots=True)
class MoveCounts:
    """What was decided, for metrics. Seconds are predictions at the time of the decision."""

    fetches: int = 0
    fetched_tokens: int = 0
    fetch_seconds: float = 0.0
    saved_seconds: float = 0.0
    """Prefill that the fetched prefixes replaced."""
    refused: int = 0
    """Prefixes that were left below, because computing them anew was predicted to be faster."""
    late: int = 0
    parked: int = 0
    """Preempted sequences whose state is copied to the host."""
    park_seconds: float = 0.0
    recomputed: int = 0
    """Preempted sequences whose state is not copied, because computing it anew was predicted to be faster."""
    recompute_seconds: float = 0.0


class Parking:
    def __init__(self, state: StateManager, prices: Prices, clock: Callable[[], float]) -> None:
        self._state, self.prices, self._clock = state, prices, clock
        self.next_turn: Callable[[Sequence, float], float] = lambda seq, now: 0.0
        """The policy's estimate of when a waiting sequence runs again."""
        self.counts = MoveCounts()

    # -- parking

    def park(self, seq: Sequence, keep: bool, for_memory: bool) -> None:
        """Release the state of a preempted sequence. `keep`: it may come back to what it has computed. `for_memory`:
        its places are needed now, so that the cache will not keep them for long."""
        assert seq.state is not None
        if seq.state.mixed:  # with the weights of today it would not have been computed so
            keep = False
            seq.begin_anew(self._state)
        if not keep or not seq.request.reuse:
            return self._state.release(seq.state)
        slots = 0 if self._state.snapshots is None else 1
        copy = for_memory and self._copies(self._state.held(seq.state), slots, seq.computed)
        seq.parked = self._state.park(seq.state, seq.computed, copy)

    def _copies(self, pages: int, slots: int, computed: int) -> bool:
        """Whether a preempted sequence's state should be copied to the host: that, and the way back, are predicted to
        take less time than computing it anew."""
        tiers = self._state.tiers
        moving = None if tiers is None else tiers.seconds_down_and_up(pages, slots)
        if moving is None:
            return False
        computing = self.prices.prefill(0, computed)
        if computing is not None and computing <= moving:
            self.counts.recomputed += 1
            self.counts.recompute_seconds += computing
            return False
        self.counts.parked += 1
        self.counts.park_seconds += moving
        return True

    def forget(self, seq: Sequence) -> None:
        """It runs, or has ended: nothing is kept aside for it any longer."""
        self._give_back(seq)
        if seq.parked is not None:
            self._state.unpark(seq.parked)
            seq.parked = None

    # -- fetching

    def advance(self, waiting: Iterable[Sequence], free_rows: int) -> None:
        """Start the copies whose time has come, and the fetches of the sequences that will be admitted next."""
        tiers = self._state.tiers
        if tiers is None:
            return
        if tiers.swap_more() or self._swap_out(waiting):
            return  # what comes in would take the room that is being made
        tiers.write_behind()
        for seq in islice(waiting, free_rows + AHEAD):
            if seq.parent is None and not seq.sought and seq.request.reuse:
                self._seek(seq)
        tiers.advance()

    def _swap_out(self, waiting: Iterable[Sequence]) -> bool:
        """When free places run short, copy the parked sequence that runs again last to the host, so that its places are
        evicted before others. True if copies have started."""
        state, tiers = self._state, self._state.tiers
        assert tiers is not None
        if not tiers.short:
            return False
        now = self._clock()
        parked = [seq for seq in waiting if seq.parked is not None and not seq.swapped and seq.fetch is None]
        for seq in sorted(parked, key=lambda one: -self.next_turn(one, now)):
            assert seq.parked is not None
            seq.swapped = True
            keys = [key for key in state.keys_of(seq.parked, seq.chain) if tiers.device_pool(key).find(key) is not None]
            if seq.parked.step <= state.pages.settled and self._copies(len(keys), 0, seq.parked.computed):
                return tiers.swap_out(keys)
        return False

    def _seek(self, seq: Sequence) -> None:
        state, tiers = self._state, self._state.tiers
        assert tiers is not None
        length, keys = self._wanted(seq)
        if all(tiers.device_pool(key).find(key) is not None for key in keys):
            if keys:
                seq.fetch = tiers.fetch(keys, length, 0.0)  # so that others do not evict it meanwhile
            seq.sought = not keys or seq.fetch is not None
            return
        have = state.match(seq.chain, seq.tokens, length).length
        seconds, computed = tiers.seconds_up(keys), self.prices.prefill(have, length)
        if computed is not None and computed <= seconds:
            seq.sought = True
            self.counts.refused += 1
            return
        seq.fetch = tiers.fetch(keys, length, seconds)
        if seq.fetch is not None:  # else there may be room later
            seq.sought = True
            self.counts.fetches += 1
            self.counts.fetched_tokens += length - have
            self.counts.fetch_seconds += seconds
            self.counts.saved_seconds += computed or 0.0

    def _wanted(self, seq: Sequence) -> tuple[int, list[Key]]:
        """The tokens whose state could be on the device, and the keys of all that this needs."""
        state, tiers = self._state, self._state.tiers
        assert tiers is not None
        if seq.parked is not None:
            keys = state.keys_of(seq.parked, seq.chain)
            if all(tiers.device_pool(key).find(key) is not None or tiers.find(key) is not None for key in keys):
                return seq.parked.computed, keys
        limit = (seq.prompt_len if seq.children else len(seq.tokens)) - 1
        length = state.reach(seq.chain, seq.tokens, limit)
        return length, state.keys_for(seq.chain, length) if length else []

    def awaits(self, seq: Sequence) -> bool:
        """Whether the sequence should not be admitted yet, because its prefix is on its way."""
        if seq.fetch is not None and seq.fetch.short and seq.fetch.done:
            self._give_back(seq)
            seq.sought = False
        if not seq.sought:
            self._seek_now(seq)
        fetch = seq.fetch
        if fetch is None or fetch.done:
            return False
        if self._clock() - fetch.begun <= max(LATE_SECONDS, LATE_FACTOR * fetch.expected):
            return True
        self.counts.late += 1
        self._give_back(seq)
        return False

    def lacks_room(self, seq: Sequence, waiting: Iterable[Sequence], runs: bool) -> bool:
        """Whether the sequence should wait, because its prefix is below and has no room on the device yet. Others that
        run (`runs`), leave the device or hold something will make room."""
        tiers = self._state.tiers
        while tiers is not None and not seq.sought and seq.request.reuse:
            if runs or tiers.swapping:
                return True
            if not self.yield_memory(waiting, seq):
                return False
            self._seek_now(seq)
        return seq.fetch is not None and not seq.fetch.done

    def _seek_now(self, seq: Sequence) -> None:
        """Seek the prefix of a sequence that was not looked at ahead, because its turn comes early or there was no
        room."""
        tiers = self._state.tiers
        if tiers is not None and not tiers.swapping and seq.request.reuse:
            self._seek(seq)
            tiers.advance()

    def promised(self) -> int:
        """Pages that prefixes on their way will take."""
        tiers = self._state.tiers
        return 0 if tiers is None else tiers.promised(self._state.pages)

    def _give_back(self, seq: Sequence) -> None:
        if seq.fetch is not None:
            assert self._state.tiers is not None
            self._state.tiers.release(seq.fetch)
            seq.fetch = None

    def yield_memory(self, waiting: Iterable[Sequence], to: Sequence | None = None) -> bool:
        """Give back what the last sequence other than `to` that holds something while it waits holds; False if none
        does."""
        last = None
        for seq in waiting:
            if seq.fetch is not None and seq is not to:
                last = seq
        if last is None:
            return False
        self._give_back(last)
        last.sought = False  # what is evicted meanwhile is fetched again
        return True
