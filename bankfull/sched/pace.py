"""Prediction of step times from the last steps: how many prompt tokens fit into a step of bounded time.

A step with decodes is bounded in time, because their next tokens wait for its end: `step_tokens` take a tenth of a
second on one machine and ten seconds on another. The model: a step takes the time of its decodes, plus a fixed time for
each prompt token, since both read the same weights. Prompt tokens with logprobs also go through the head, and have
their own rate. The context length is not part of the model: chunks become slower as a prompt gets longer, and each is
predicted from those just before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

ALONE = 4
"""Factor of the bound while no sequence decodes. A request that arrives meanwhile waits for the end of the step."""
SHARED = 0.4
"""Factor of the bound while requests of several tenants arrive. A new request waits for the end of the current step and
then for its own step, which prompts of other tenants may fill; both together stay within the bound."""
FIRST_TOKENS = 64
"""Prompt tokens beside decodes before any prompt was timed."""
LEAST_TOKENS = 8
"""Minimum prompt tokens of a step on any machine: with fewer, one token costs as much as several."""
SCORED = 4.0
"""Assumed cost of a prompt token with logprobs, relative to one without, before any was timed."""
LEAST_SHARE = 0.4
"""Least cost of a prompt token, relative to the average token of its step. The decodes of a step may be predicted as
slower than the whole step, and a prompt token that seems free would make the next step endless."""
REMEMBERED = 8
"""Steps that a rate is averaged over."""
RELIABLE_TOKENS = 16
"""Minimum prompt tokens for a single step to be a reliable measurement."""


class Rate:
    """Seconds per token over the last steps, weighted by their tokens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def observe(self, tokens: int, seconds: float) -> None:
        self._seen.append((tokens, seconds))

    @property
    def seconds(self) -> float | None:
        if not self._seen:
            return None
        tokens, seconds = self._seen[-1]
        # A slowdown counts at once, a speed-up only after a few steps.
        last = seconds / tokens if tokens >= RELIABLE_TOKENS else 0.0
        return max(last, sum(seconds for _, seconds in self._seen) / sum(tokens for tokens, _ in self._seen))


class Pace:
    """`bound`: maximum seconds of a step with decodes; 0 for no limit. `least`: prompt tokens that a step may always
    have."""

    def __init__(self, bound: float = 0.0, least: int = LEAST_TOKENS) -> None:
        self.bound, self.least = bound, least
        self.measured = bound > 0
        """Whether steps are timed, which a bound needs."""
        self.forecast: Callable[[int, int], float] | None = None
        """Seconds of a prompt's tokens from one to another, by a model of this machine; for the time before any was
        measured."""
        self._decodes: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        """Sequences and seconds of steps without prompts."""
        self._plain, self._scored = Rate(), Rate()

    def observe(self, decoding: int, plain: int, scored: int, seconds: float) -> None:
        """Learn from one step: its seconds, decoding sequences, and prompt tokens without and with logprobs."""
        if seconds <= 0:
            return
        if not plain + scored:
            if decoding:
                self._decodes.append((decoding, seconds))
            return
        # A prompt alone reads the weights, too, as one decoding sequence does.
        prompts = plain + scored
        least = LEAST_SHARE * seconds * prompts / (prompts + decoding)
        left = max(least, seconds - self.decode_seconds(max(1, decoding)))
        if not scored:
            self._plain.observe(plain, left)
        else:
            known = self._plain.seconds
            share = plain / (plain + SCORED * scored) if known is None else 0.0
            of_plain = min(left, share * left if known is None else plain * known)
            self._scored.observe(scored, left - of_plain)

    def decode_seconds(self, decoding: int) -> float:
        """Predicted seconds of a step with this many decoding sequences; assumed to grow with them."""
        if not self._decodes or not decoding:
            return 0.0
        return median([seconds * (decoding / rows) if rows < decoding else seconds for rows, seconds in self._decodes])

    def token_seconds(self, scored: bool) -> float | None:
        """Seconds per prompt token; None before any was timed."""
        seconds = (self._scored if scored else self._plain).seconds
        if seconds is not None or not scored:
            return seconds
        plain = self._plain.seconds
        return None if plain is None else SCORED * plain

    def prefill(self, start: int, end: int) -> float | None:
        """Predicted seconds of the tokens from `start` to `end` of a prompt, as measured on this machine, else by the
        forecast; None if there is neither."""
        each = self.token_seconds(False)
        if each is not None:
            return each * (end - start)
        return None if self.forecast is None else self.forecast(start, end)

    def room(self, decoding: int, awaited: bool, shared: bool = False) -> Room | None:
        """Time for the prompts of a step with this many decoding sequences; None for no limit. `awaited`: a user waits
        for the next token of one of them. `shared`: another tenant's request may arrive during the step."""
        if not self.bound or (not awaited and not shared and self._plain.seconds is None):
            return None
        factor = SHARED if shared else 1 if awaited else ALONE
        seconds = factor * self.bound - self.decode_seconds(max(1, decoding))
        if shared:  # many decodes of one tenant must not starve the prompts of another
            seconds = max(seconds, SHARED / 2 * self.bound)
        return Room(self, seconds)


class Room:
    """Time that is left for prompts while a step is planned."""

    __slots__ = ("_given", "_pace", "_seconds")

    def __init__(self, pace: Pace, seconds: float) -> None:
        self._pace, self._seconds = pace, seconds
        self._given = 0

    def tokens(self, scored: bool) -> int:
        """Tokens of one more prompt that fit. A step always admits some, so that a slow machine makes progress."""
        each = self._pace.token_seconds(scored)
        if each is None:
            return max(0, FIRST_TOKENS - self._given)
        fits = int(self._seconds / each) if each else 1 << 30
        if fits > 0 and not self._given:
            fits -= fits % self._pace.least  # jitter in step times must not change the size of every chunk
        return max(fits, self._pace.least - self._given, 0)

    def take(self, tokens: int, scored: bool) -> None:
        self._given += tokens
        self._seconds -= tokens * (self._pace.token_seconds(scored) or 0.0)


def kinds_of(counts: Iterable[tuple[int, bool]]) -> tuple[int, int, int]:
    """Decoding sequences, and prompt tokens without and with logprobs, from each sequence's (tokens, scored)."""
    decoding = plain = scored = 0
    for tokens, has_scores in counts:
        if has_scores:
            scored += tokens
        elif tokens > 1:
            plain += tokens
        else:
            decoding += 1
    return decoding, plain, scored
