"""Plain decoding: one token per row and step."""

from __future__ import annotations

from bankfull.decode.strategy import Draft, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify


class Plain(Strategy):
    idle = True
    exact = True

    def width(self, load: int) -> int:
        return 0

    def propose(self, view: View) -> Draft | None:
        return None

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)
