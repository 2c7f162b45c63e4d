"""Stop strings in a stream of text.

The stop string that is complete first wins, so generation ends at once and needs no further token to decide; among
stops that are complete at the same character the longest wins, so that the least text is emitted. The outcome depends
on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.errors import RequestError


class StopText:
    """Passes text on, holding back what may become a stop string; `stopped` is the one that was found.

    `include` also emits the stop string itself. One pass over the text: for each stop, `_matched` is the length of its
    longest prefix that the text so far ends with (Knuth, Morris and Pratt).
    """

    __slots__ = ("_borders", "_held", "_include", "_matched", "_stops", "stopped")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if isinstance(stops, str):
            raise RequestError(f"stop strings are a list, not the one text {stops!r}: put it in a list")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"the stop strings {list(stops)!r} are not all non-empty texts: remove the others")
        self.stopped: str | None = None
        # Longest first: the first stop found complete at a character is then the one that wins.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be emitted now; nothing more once `stopped` is set."""
        if self.stopped is not None:
            return ""
        pending = self._held + text
        for position, character in enumerate(text, len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                matched, borders = self._matched[index], self._borders[index]
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                self._matched[index] = matched
                if matched == len(stop):
                    self.stopped, self._held = stop, ""
                    return pending[: position if self._include else position - len(stop)]
        safe = len(pending) - max(self._matched, default=0)
        self._held = pending[safe:]
        return pending[:safe]

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of the longest proper prefix of it that it also ends with."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        length += stop[index] == stop[length]
        borders[index] = length
    return borders
