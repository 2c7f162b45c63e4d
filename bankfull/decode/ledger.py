"""What drafting has won or lost relative to plain decoding, in seconds: no draft is made on credit.

Each step with a part in drafting (tokens that the drafter runs, proposals, verification) is compared with the plain
steps that would have given the same tokens. A small share of all time may be lost to trials, and so may a part of what
was won. Where that is used up, no step drafts, whatever the estimates say. So drafting costs at most this share, a few
steps at the start, and what one step loses beyond the limit.
"""

from __future__ import annotations

LOSS_SHARE = 0.015
"""Share of all time that may be lost."""
START_STEPS = 8.0
"""Plain steps' time that the first trials may lose."""
KEPT_STEPS = 16.0
"""Plain steps' time of gains, or of unused share, that may be lost again at most."""


class DraftLedger:
    def __init__(self) -> None:
        self.left = 0.0
        """Seconds that drafting may lose from now on."""
        self.won = 0.0
        """Seconds won by drafting so far; negative if it has lost."""
        self._opened = False

    def open(self, plain: float) -> None:
        """A plain step is known to take so many seconds."""
        if not self._opened:
            self._opened = True
            self.left += START_STEPS * plain

    def add(self, seconds: float, won: float, plain: float | None) -> None:
        """A step of so many seconds. `won`: relative to plain decoding; `plain`: seconds of a plain step, if known."""
        self.won += won
        self.left += LOSS_SHARE * seconds + won
        if plain is not None:
            self.left = min(self.left, KEPT_STEPS * plain)
