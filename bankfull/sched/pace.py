"""How fast this machine is, learned from the steps that it has made: what a prompt's next tokens will take.

A step in which somebody decodes is bounded in time, because their next token waits for its end: `step_tokens` take a
tenth of a second on one machine and ten seconds on another. What a step takes is taken for that of its decodes, and so
much more for each token of a prompt: the same weights are read for both. Tokens whose scores are asked for (prompt
logprobs) go through the head as well, and have a rate of their own. Contexts are not in this model: a prompt's chunks
become slower as it gets longer, and each is predicted from those just before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median

ALONE = 4
"""Times the bound: what a step may take while nobody decodes. Whoever comes meanwhile waits for its end."""
FIRST_TOKENS = 64
"""Of a prompt beside decodes, before any prompt has been seen."""
LEAST_TOKENS = 8
"""Of a prompt in each step, however slow the machine is: below that a token costs as much as several."""
SCORED = 4.0
"""How much longer tokens with scores are thought to take, before any were seen."""
REMEMBERED = 8
RELIABLE_TOKENS = 16
"""From so many on, a single step tells something."""


class Rate:
    """Seconds for a token, from the last few steps; each counts by its tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def observe(self, tokens: int, seconds: float) -> None:
        self._seen.append((tokens, seconds))

    @property
    def seconds(self) -> float | None:
        if not self._seen:
            return None
        tokens, seconds = self._seen[-1]
        # A machine that has just become slow is believed at once, one that has become fast again after a few steps.
        last = seconds / tokens if tokens >= RELIABLE_TOKENS else 0.0
        return max(last, sum(seconds for _, seconds in self._seen) / sum(tokens for tokens, _ in self._seen))


class Pace:
    """`bound`: seconds that a step with decodes may take; 0: as long as it takes. `least`: tokens of a prompt that a
    step has however long they take."""

    def __init__(self, bound: float = 0.0, least: int = LEAST_TOKENS) -> None:
        self.bound, self.least = bound, least
        self._decodes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        """Sequences and seconds of steps without prompts."""
        self._plain, self._scored = Rate(), Rate()

    def observe(self, decoding: int, plain: int, scored: int, seconds: float) -> None:
        """Learns from one step: its seconds, decoding sequences, and prompt tokens without and with prompt logprobs."""
        if seconds <= 0:
            return
        if not plain + scored:
            if decoding:
                self._decodes.append((decoding, seconds))
            return
        # A prompt alone reads the weights, too, as one decoding sequence would.
        left = max(0.0, seconds - self.decode_seconds(max(1, decoding)))
        if not scored:
            self._plain.observe(plain, left)
        else:
            known = self._plain.seconds
            share = plain / (plain + SCORED * scored) if known is None else 0.0
            of_plain = min(left, share * left if known is None else plain * known)
            self._scored.observe(scored, left - of_plain)

    def decode_seconds(self, decoding: int) -> float:
        """Of a step in which so many sequences decode; taken to grow with them, and never to shrink."""
        if not self._decodes or not decoding:
            return 0.0
        return median(seconds * max(1.0, decoding / rows) for rows, seconds in self._decodes)

    def token_seconds(self, scored: bool) -> float | None:
        """None: nobody knows yet."""
        own = (self._scored if scored else self._plain).seconds
        if own is not None or not scored:
            return own
        plain = self._plain.seconds
        return None if plain is None else SCORED * plain

    def predict(self, decoding: int, plain: int, scored: int) -> float:
        """Seconds of such a step; 0 where nothing is known."""
        parts = [(plain, self.token_seconds(False)), (scored, self.token_seconds(True))]
        return self.decode_seconds(decoding) + sum(count * (each or 0.0) for count, each in parts)

    def room(self, decoding: int, awaited: bool) -> Room | None:
        """For the prompts of a step in which so many sequences decode; `awaited`: somebody waits for one's next token.
        None: for any."""
        if not self.bound or (not awaited and self._plain.seconds is None):
            return None
        return Room(self, (1 if awaited else ALONE) * self.bound - self.decode_seconds(decoding))


class Room:
    """What is left of a step's time while it is planned."""

    __slots__ = ("_given", "_pace", "_seconds")

    def __init__(self, pace: Pace, seconds: float) -> None:
        self._pace, self._seconds = pace, seconds
        self._given = 0

    def tokens(self, scored: bool) -> int:
        """Of one more prompt that fit. A step always has some: a slow machine goes on slowly."""
        each = self._pace.token_seconds(scored)
        if each is None:
            return max(0, FIRST_TOKENS - self._given)
        fits = int(self._seconds / each) if each else 1 << 30
        if fits > 0 and not self._given:
            fits -= fits % self._pace.least  # a little jitter in what steps take must not make another chunk each time
        return max(fits, self._pace.least - self._given, 0)

    def take(self, tokens: int, scored: bool) -> None:
        self._given += tokens
        self._seconds -= tokens * (self._pace.token_seconds(scored) or 0.0)


def kinds_of(counts: Iterable[tuple[int, bool]]) -> tuple[int, int, int]:
    """Sequences that decode, and tokens of prompts without and with scores, of (tokens, scored) of a step's parts."""
    decoding = plain = scored = 0
    for tokens, has_scores in counts:
        if has_scores:
            scored += tokens
        elif tokens > 1:
            plain += tokens
        else:
            decoding += 1
    return decoding, plain, scored
