"""Plain decoding: one token per row and step."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.decode.strategy import Draft, Sampling, Scores, Verdict, View
from bankfull.decode.verify import verify


class Plain:
    needs: frozenset[str] = frozenset()
    idle = True
    trees = False

    def width(self, load: int) -> int:
        return 0

    def begin(self, rows: Sequence[int]) -> None:
        pass

    def propose(self, view: View) -> Draft | None:
        return None

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)

    def observe(self, view: View, verdict: Verdict) -> None:
        pass
