"""Chooses the rows that a strategy drafts for, and how many drafts each of them verifies, by measured time.

A width w gives 1 + a(w) tokens per row and step, where a(w) is the measured number of accepted drafts, and takes
c(w, load) seconds, proposing included. All of it is measured while the engine serves; nothing is assumed about the
machine or the model. Steps run with the width of the highest rate (1 + a) / c at their load, and without the rows whose
own requests accept too little.

A drafter with a model of its own must have run a row's tokens before it can draft there. It does so for a prompt only
where the expected gain is higher than that cost, and runs skipped tokens later under the same condition.

Plain steps are measured first, since they cost nothing. Then widths are tried, and tried again more and more rarely
while they do not pay. A ledger of all that drafting has cost and given ends every loss (`decode.ledger`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from bankfull.decode.acceptance import AcceptedDrafts
from bankfull.decode.ledger import DraftLedger

TRIAL_STEPS = 3
"""Steps of a trial beside the one that proposes first."""
MEASURED = 2
"""Measurements that a width needs to be compared."""
STOP_LOSS = 4.0
"""Plain steps' time after which a trial ends early; the assumed loss of the first one."""
REMEMBERED = 15
"""Steps of one width and load whose median time counts."""
SOON, SELDOM = 64, 1024
"""Steps until a width that is not in use is tried again: at first, and after trials that did not pay."""
PLAIN_AGAIN = 256
"""Steps with drafts after which plain steps are measured again."""
USUAL_ANSWER = 64.0
"""Tokens of an answer, before any has ended."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A sequence of a planned step."""

    row: int
    key: Hashable
    samples: bool
    """Whether it gets a token in the step, so that drafts could follow."""
    behind: int
    """Tokens that the strategy has to run before it can draft here, beside those of the step; negative if it cannot."""
    prompt: int
    """Known tokens that are not computed, if they are more than the newest one."""
    left: int
    """Tokens that it may still generate."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    width: int
    """Drafts that are proposed for each of `rows` that samples."""
    rows: frozenset[int]


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """A step that has settled."""

    lines: Sequence[tuple[Hashable | None, int, int]]
    """Sequences that got tokens: the key of each, None if it has ended since; its verified and accepted drafts."""
    width: int
    """Drafts that were proposed at its end."""
    whole: bool
    """Whether all rows decode and the strategy was used for all of them, or for none."""
    caught_up: int
    """Tokens that the strategy ran because it had not yet: prompts, and what it had skipped."""
    used: bool
    """Whether the strategy was used for any row."""
    prompts: bool
    seconds: float
    drafting: float
    """The part of `seconds` that the strategy took."""


@dataclass(slots=True)
class MeasuredWidth:
    """Measurements of one width at one load."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    usual: float = 0.0
    """The median of `seconds`: computed when one is added, because each step compares all widths."""
    last: int = 0
    """The number of the last step."""
    wait: int = SOON
    """Steps until it is tried again."""

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.usual = median_low(self.seconds)


@dataclass(slots=True)
class Trial:
    load: int
    width: int
    left: int
    limit: float
    """Seconds that it may lose."""
    seen: bool = False
    """Whether a step of it was left unmeasured: a new shape of a step is recorded or finds cold caches."""


def halved(width: int) -> tuple[int, ...]:
    """The width, its half, and so on, ascending: enough choices to be near the best one, and few to measure."""
    widths = [width]
    while widths[-1] > 2:
        widths.append(widths[-1] // 2)
    return tuple(reversed(widths))


class AdaptiveWidth:
    """`widths`: those that drafts may have, beside 0. `share`: the assumed cost of a token in the strategy's own model
    before it was measured, relative to the target model; 0 if the strategy has no state of its own. `late`: whether the
    strategy drafts as well where it runs a prompt later than the target model."""

    def __init__(self, widths: Sequence[int], share: float = 0.0, late: bool = True) -> None:
        self.widest = max(widths)
        """The most drafts."""
        self.ledger = DraftLedger()
        self._widths = (0, *sorted(set(widths)))
        self._share, self._late = share, late
        self._tried: dict[tuple[int, int], MeasuredWidth] = {}
        """Measurements by load and width."""
        self._accepted = AcceptedDrafts(self._widths[1:])
        self._steps = 0
        self._trial: Trial | None = None
        self._follows: dict[Hashable, bool] = {}
        """Whether the strategy runs the prompts of running requests with the target model."""
        self._prompt_seconds: float | None = None
        """Seconds of a prompt token in the target model."""
        self._catching: float | None = None
        """Measured seconds of a token that the strategy runs beside its proposals."""
        self._proposing = 0.0
        """Seconds of a proposal without such tokens."""
        self._answer, self._generated = USUAL_ANSWER, dict[Hashable, int]()

    # -- choosing

    def choose(self, rows: Sequence[DraftRow]) -> DraftChoice:
        """The choice for the next step."""
        decoding = [one for one in rows if one.samples and one.behind >= 0]
        count = sum(one.samples for one in rows)
        width, drafted = self._drafted(decoding, count) if decoding else (0, [])
        prompts = [one for one in rows if one.prompt and self._runs_prompt(one, count)]
        return DraftChoice(width, frozenset(one.row for one in (*drafted, *prompts)))

    def _drafted(self, rows: Sequence[DraftRow], count: int) -> tuple[int, Sequence[DraftRow]]:
        load = load_of(count)
        trial = self._trial
        if trial is not None:
            if trial.load == load and trial.left > 0 and trial.limit >= 0 and self.ledger.left > 0:
                trial.left -= 1
                return trial.width, rows if trial.width else ()
            self._end(trial)
        plain = self._plain(load)
        if plain is None or (self.ledger.left <= 0 and self._known(load) != [0]):
            return 0, ()
        best = self.best(load, rows)
        if (other := self._due(load, rows, best, plain)) is not None:
            return other, rows if other else ()
        if not best:
            return 0, ()
        self._tried[load, best].last = self._steps
        return best, self._worthwhile(load, rows, best, plain, count)

    def best(self, load: int, rows: Sequence[DraftRow] = ()) -> int:
        """The width of the highest measured rate."""
        return max(self._known(load), key=lambda width: (self._rate(load, width, rows), -width))

    def _due(self, load: int, rows: Sequence[DraftRow], best: int, plain: float) -> int | None:
        """Begin a trial of another width, if one is due and the ledger allows it."""
        for width in sorted(self._widths, key=lambda width: self._age(load, width)):
            tried = self._tried.get((load, width))
            if width == best or (width and not all(self._joins(one) for one in rows)):
                continue
            if width == 0:
                if self._steps - self._tried[load, 0].last >= PLAIN_AGAIN:
                    return self._begin(load, 0, plain)
                continue
            guess = self._guessed(load, width)
            known = tried is not None and len(tried.seconds) >= MEASURED
            if known and self._steps - tried.last < tried.wait:  # type: ignore[union-attr]
                continue
            if guess is None:
                loss = STOP_LOSS * plain
            else:
                loss = (1 + TRIAL_STEPS) * max(
                    0.0, guess - (1 + self._mean(width, rows)) / self._rate(load, best, rows)
                )
                if not known and loss > 0 and self._accepted.measured(self.widest) and best == 0:
                    loss = max(loss, plain)
            loss += 0.0 if best else sum(self._cost(one.behind) for one in rows)
            if loss <= self.ledger.left:
                return self._begin(load, width, plain, loss)
        return None

    def _begin(self, load: int, width: int, plain: float, loss: float = 0.0) -> int:
        if width:
            self._accepted.doubt(width)
        self._trial = Trial(load, width, TRIAL_STEPS if width else MEASURED + 1, max(loss, STOP_LOSS * plain))
        return width

    def _end(self, trial: Trial) -> None:
        self._trial = None
        tried = self._tried.setdefault((trial.load, trial.width), MeasuredWidth())
        tried.last = self._steps
        if trial.width and self._plain(trial.load) is not None:
            pays = bool(tried.seconds) and self.best(trial.load) == trial.width
            tried.wait = SOON if pays else min(SELDOM, 2 * tried.wait)

    def _worthwhile(
        self, load: int, rows: Sequence[DraftRow], width: int, plain: float, count: int
    ) -> Sequence[DraftRow]:
        """The rows whose own drafts are worth their part of the step, and what the strategy has to run first."""
        seconds, chosen = self._tried[load, width].usual, []
        token = 1 / (self._rate(load, width, rows) * count)  # seconds per token at the best rate
        for one in rows:
            accepted = self._accepted.of(one.key, width)
            gain = accepted * token - (seconds - plain) / count
            if gain > 0 and (one.behind == 0 or self._pays(one, one.behind, gain / (1 + accepted))):
                chosen.append(one)
        return chosen

    def _runs_prompt(self, one: DraftRow, count: int) -> bool:
        """Whether the strategy runs a prompt with the target model. Decided once for each request."""
        if not self._share:
            return False
        if one.key not in self._follows:
            self._follows[one.key] = self._pays_prompt(one, load_of(max(1, count)))
        return self._follows[one.key]

    def _pays_prompt(self, one: DraftRow, load: int) -> bool:
        plain = self._plain(load)
        tried = any(width and measured.seconds for (_, width), measured in self._tried.items())
        if not self._late and not tried:
            return not self._follows  # there is nothing to try where no prompt was run
        if plain is None or self.ledger.left <= 0:
            return False
        best = self.best(load)
        if best:
            gain = plain - 1 / self._rate(load, best, ())
            return self._pays(one, one.prompt, gain)
        wait = min(m.wait for (at, width), m in self._tried.items() if width) if tried else 0
        last = max((m.last for (at, width), m in self._tried.items() if width), default=0)
        due = not self._late and self._steps - last >= wait
        return due and self._cost(one.prompt) + STOP_LOSS * plain <= self.ledger.left

    def _joins(self, one: DraftRow) -> bool:
        return one.behind == 0 or self._late or one.behind <= SOON

    def _pays(self, one: DraftRow, tokens: int, gain: float) -> bool:
        """Whether `gain` seconds for each token that the request will probably generate exceed the cost of running
        `tokens` first."""
        expected = max(self._answer - self._generated.get(one.key, 0), self._generated.get(one.key, 0), 1.0)
        return self._joins(one) and gain * min(one.left, expected) > self._cost(tokens)

    def _cost(self, tokens: int) -> float:
        """Seconds in which the strategy runs these tokens."""
        if not tokens or not self._share:
            return 0.0
        if self._catching is not None:
            return tokens * self._catching
        return tokens * self._share * (self._prompt_seconds or 0.0)

    # -- measuring

    def observe(self, step: DraftedStep) -> None:
        self._steps += 1
        load, rows = load_of(len(step.lines)), len(step.lines)
        plain = self._plain(load) if rows else None
        accepted = sum(line[2] for line in step.lines)
        drafts = [line[1] for line in step.lines]
        for key, width, right in step.lines:
            if key is None:
                continue
            self._generated[key] = self._generated.get(key, 0) + 1 + right
            if width in self._widths[1:]:
                self._accepted.add(key, width, right)
        self._measure(step, load, drafts)
        used = step.used or any(drafts)
        if plain is None or not used:
            won = -step.drafting
        elif step.prompts:
            won = accepted / rows * plain - step.drafting
        else:
            won = (1 + accepted / rows) * plain - step.seconds
        self.ledger.add(step.seconds, won, plain)
        if self._trial is not None and self._trial.width and used:
            self._trial.limit += won

    def _measure(self, step: DraftedStep, load: int, drafts: Sequence[int]) -> None:
        if step.caught_up > 1 and step.drafting:
            each = max(0.0, step.drafting - self._proposing) / step.caught_up
            self._catching = each if self._catching is None else (3 * self._catching + each) / 4
        elif step.drafting and step.width:
            self._proposing = step.drafting
        if not step.whole or not drafts or any(count != step.width for count in drafts):
            return
        tried = self._tried.setdefault((load, step.width), MeasuredWidth())
        tried.last = self._steps
        trial = self._trial
        if trial is not None and trial.width == step.width and not trial.seen:
            trial.seen = True
            if trial.limit > 0 or tried.seconds:
                return
        tried.add(step.seconds)
        if step.width == 0 and len(tried.seconds) >= MEASURED:
            self.ledger.open(tried.usual)

    def took_prompt(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` prompt tokens has taken so long in the target model."""
        each = seconds / tokens
        self._prompt_seconds = each if self._prompt_seconds is None else (3 * self._prompt_seconds + each) / 4

    def forget(self, key: Hashable) -> None:
        """A sequence has ended."""
        self._follows.pop(key, None)
        self._accepted.forget(key)
        if (tokens := self._generated.pop(key, 0)) > 0:
            self._answer += (tokens - self._answer) / 4

    # -- estimates

    def _plain(self, load: int) -> float | None:
        tried = self._tried.get((load, 0))
        return tried.usual if tried is not None and len(tried.seconds) >= MEASURED else None

    def _known(self, load: int) -> list[int]:
        tries = ((width, self._tried.get((load, width))) for width in self._widths)
        return [width for width, tried in tries if tried is not None and tried.seconds]

    def _age(self, load: int, width: int) -> int:
        """The last step with this width; widths without measurements come first, the widest of them before others."""
        tried = self._tried.get((load, width))
        return -width if tried is None or not tried.seconds else tried.last

    def _guessed(self, load: int, width: int) -> float | None:
        """Seconds of a step with this width: measured, or between a wider one and a plain one."""
        tried = self._tried.get((load, width))
        if tried is not None and tried.seconds:
            return tried.usual
        wider = [other for other in self._known(load) if other > width]
        if not wider:
            return None
        plain = self._tried[load, 0].usual
        return plain + (self._tried[load, wider[0]].usual - plain) * width / wider[0]

    def _mean(self, width: int, rows: Sequence[DraftRow]) -> float:
        if not rows:
            return self._accepted.mean(width)
        return sum(self._accepted.of(one.key, width) for one in rows) / len(rows)

    def _rate(self, load: int, width: int, rows: Sequence[DraftRow]) -> float:
        """Tokens of a row per second."""
        return (1 + self._mean(width, rows)) / self._tried[load, width].usual


def load_of(rows: int) -> int:
    """Loads that are measured together: 1, 2, 3-4, 5-8, and so on."""
    return max(0, rows - 1).bit_length()
