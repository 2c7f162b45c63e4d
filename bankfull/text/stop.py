"""Stop strings in a stream of text.

The stop string that is completed first wins, so generation ends without waiting for another token. Among stop strings
completed at the same character the longest wins, so that the least text is emitted. The result depends only on the
text, never on how it is split into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bankfull.errors import RequestError


class StopTable:
    """All stop strings of a request as one Aho-Corasick automaton. It is immutable, so that all samples of the request
    share it.

    A state is the number of a prefix of a stop string; 0 is the empty prefix. The cost per character of text does not
    depend on the number of stop strings; building the automaton is linear in their total length.
    """

    __slots__ = ("_depths", "_fallbacks", "_found", "_next", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError(f"stop strings must be a list, not the string {stops!r}: put it in a list")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"the stop strings {list(stops)!r} must all be non-empty strings: remove the others")
        self._stops = list(dict.fromkeys(stops))
        self._next: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._found = [-1]
        """For each state, the index of the longest stop string that ends there; -1: none."""
        for number, stop in enumerate(self._stops):
            self._found[self._state_of(stop)] = number
        self._fallbacks = [0] * len(self._next)
        self._find_fallbacks()

    def follow(self, state: int, character: str) -> int:
        """The state after `character`: the longest prefix of a stop string that the text ends with."""
        while (after := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallbacks[state]
        return after

    def depth(self, state: int) -> int:
        """Characters at the end of the text that may become a stop string."""
        return self._depths[state]

    def complete(self, state: int) -> str | None:
        index = self._found[state]
        return None if index < 0 else self._stops[index]

    def _state_of(self, stop: str) -> int:
        state = 0
        for character in stop:
            after = self._next[state].get(character)
            if after is None:
                after = self._next[state][character] = len(self._next)
                self._next.append({})
                self._depths.append(self._depths[state] + 1)
                self._found.append(-1)
            state = after
        return state

    def _find_fallbacks(self) -> None:
        """For each state, find the longest proper suffix that is also a state; shorter states come first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            fallback = self._fallbacks[state]
            if self._found[state] < 0:
                self._found[state] = self._found[fallback]
            for character, after in self._next[state].items():
                self._fallbacks[after] = self.follow(fallback, character)
                waiting.append(after)


class StopText:
    """Passes text on and holds back what may become a stop string. `stopped` is the stop string that was found;
    `include` emits it, too."""

    __slots__ = ("_held", "_include", "_state", "_table", "stopped")

    def __init__(self, stops: StopTable | Sequence[str], include: bool = False) -> None:
        self._table = stops if isinstance(stops, StopTable) else StopTable(stops)
        self.stopped: str | None = None
        self._state = 0
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be emitted now; nothing more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        pending = self._held + text
        table, state = self._table, self._state
        for position, character in enumerate(text, len(self._held) + 1):
            state = table.follow(state, character)
            stop = table.complete(state)
            if stop is not None:
                self.stopped, self._held = stop, ""
                return pending[: position if self._include else position - len(stop)]
        self._state = state
        safe = len(pending) - table.depth(state)
        self._held = pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """The held-back text, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        self._state = 0
        return held
