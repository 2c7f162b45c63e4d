"""Draft tokens from a second, smaller model with the same vocabulary: a chain, or a tree along its best path.

The model reads and writes keys and values in the pages of the target model's sequences. In `propose` it runs the last
two known tokens, chooses a draft, runs it, and so on: one pass per draft of the chain. A pass gives the whole
distribution, so further tokens of it are free drafts: leaves beside the chain.

The token before the newest one is run again because it may be a draft that was never run: the last of a chain, or a
leaf. All tokens before it were run as drafts or in `follow`, and stay valid: a chain's keys and values are in place,
and an accepted path is moved for all models that share the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.rules import AcceptanceRule, SameTokens
from bankfull.decode.strategy import (
    ComputedStep,
    Draft,
    LogitsHead,
    OwnModel,
    OwnSteps,
    Sampling,
    Scores,
    Strategy,
    Verdict,
    View,
)
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.ops.attention.body import TREE_TOKENS
from bankfull.sample.draw import NO_TOKEN, draw_several
from bankfull.sample.logits import process, sample_several
from bankfull.sample.random import NumberKey, Purpose
from bankfull.sample.table import CHILD, GREEDY, PLAIN, SEED
from bankfull.state.mask import Mask
from bankfull.state.spec import Paged
from bankfull.types import Work

PIECE = 256
"""Tokens that are caught up in one pass."""
LOST = 1 << 40
"""Number of skipped tokens of a row where the host does not know it."""
MEMORY, UNREAD = 16, 0.05
"""Sequences over which it is averaged how many of them were not run to their end, and the share from which on tokens
of the prefix cache are run again."""


class ChosenRows:
    """Some rows of a view."""

    def __init__(self, view: View, which: np.ndarray) -> None:
        every = bool(which.all())
        self.lines = np.flatnonzero(which)
        """Numbers of the rows within the view."""
        self.there = view.ship(self.lines)
        """`lines` on the device."""
        self.rows = view.host_rows if every else [view.host_rows[line] for line in self.lines.tolist()]
        self.index = view.rows if every else view.rows[self.there]
        """(rows) their permanent rows, on the device."""
        self.known = view.known[self.index]
        self.ones = np.ones(len(self.rows), np.int64)


class DraftModel(Strategy):
    follows = True

    def __init__(
        self, own: OwnModel, branching: Sequence[int] = (1, 1, 1, 1), rule: AcceptanceRule | None = None
    ) -> None:
        """`branching`: the number of drafts at each depth. The best one of each depth is continued, so (1, 1, 1) is a
        chain of three. `rule`: `SameTokens` unless given."""
        self._own, self._branching = own, check_branching(branching)
        self._rule = rule or SameTokens()
        self.exact = isinstance(self._rule, SameTokens)
        self.trees = max(branching) > 1
        self._parents = tree_along_chain(branching) if self.trees else None
        self.ahead = len(branching)  # the newest token and every draft that is continued
        self._drafted: dict[int, int] = {}
        """Drafts of the rows that have fewer than a whole chain: they have just entered, or had too few KV slots. A
        step may verify more, which are arbitrary tokens."""
        self._skipped: dict[int, int] = {}
        """Skipped tokens of rows without a proposal after their last step: the number of known tokens before the last
        two from the first one on that this model has not run."""
        windows = [spec.window for states in own.model.states() for spec in states if isinstance(spec, Paged)]
        seen = [window.extent if isinstance(window, Mask) else window for window in windows]
        self._reach = min((extent for extent in seen if extent is not None), default=LOST)
        """Skipped tokens from which on a row is lost: pages behind a window belong to other sequences."""
        self._unread = 0.0
        """The share of sequences that ended before this model had run their tokens. So much of what the prefix cache
        holds lacks its keys and values."""

    @property
    def own(self) -> OwnModel:
        return self._own

    def attach(self, steps: OwnSteps) -> None:
        self._steps = steps

    def width(self, load: int) -> int:
        return sum(self._branching)

    def prepare(self, target: Decoder) -> None:
        self.share = size_of(self._own.model) / size_of(target)

    def begin(self, rows: Sequence[int]) -> None:
        self.replace(rows)
        for row, cached in zip(rows, self._steps.computed(rows), strict=True):
            self._unread += ((self._skipped.pop(row, 0) > 0) - self._unread) / MEMORY
            if cached and self._unread > UNREAD:
                self._skipped[row] = int(cached) - 1

    def replace(self, rows: Sequence[int]) -> None:
        self._drafted.update(dict.fromkeys(rows, 0))
        self._rule.forget(rows)

    def skip(self, rows: Sequence[int]) -> None:
        self._rule.forget(rows)
        for row in rows:
            self._skipped[row] = self._skipped.get(row, -1) + 1

    def miss(self, work: Sequence[Work]) -> None:
        self._rule.forget([w.row for w in work])
        for w in work:
            # With drafts, only the device knows how many of them are accepted.
            self._skipped[w.row] = self._skipped.get(w.row, -1) + (LOST if w.drafts else w.count)

    def behind(self, row: int) -> int:
        count = self._skipped.get(row, -1) + 1
        return -1 if count >= self._reach else count

    def follow(self, step: ComputedStep) -> None:
        """Run the step's tokens, unless every row has only tokens that `propose` runs or has run."""
        if any(w.count > 1 or not w.sample or w.drafts > self._drafted.get(w.row, w.drafts) for w in step.work):
            self._steps.run(step.batch)
        for w in step.work if self._skipped else ():
            if (skipped := self._skipped.get(w.row)) is None:
                continue
            if w.drafts:  # only the device knows how many of them are accepted
                self._skipped[w.row] += LOST
            elif w.count > 1 or not w.sample:  # these tokens have read what was skipped
                self._skipped[w.row] = skipped + w.count - w.sample

    def _catch_up(self, rows: Sequence[int]) -> None:
        """Run the known tokens that were skipped. A row that is lost gets poor drafts until it ends."""
        for row in rows:
            count = self.behind(row)
            if count >= 0 and self._skipped.pop(row, None) is not None:
                for first in range(-1 - count, -1, PIECE):
                    self._steps.run(self._steps.batch([row], first, [min(PIECE, -1 - first)]))

    def propose(self, view: View) -> Draft | None:
        if self._skipped:
            self._catch_up(view.host_rows)
        passes = min(len(self._branching), view.width)
        room = self._steps.room(view.host_rows, passes)
        batch = self._steps.batch(view.host_rows, -1, 1 + (room > 0))
        hidden = self._steps.run(batch)
        tokens = view.tokens.new_full((len(view.host_rows), self.width(0)), NO_TOKEN)
        facts = view.sampling.facts
        drawing = self._rule.sampled_drafts and any(facts[row] is not PLAIN for row in view.host_rows)
        drawn_from: Tensor | None = None
        self._note(view.host_rows, room)
        chosen, beside = ChosenRows(view, room > 0), len(self._branching)
        for depth, count in enumerate(self._branching[:passes]):
            if depth and (room[chosen.lines] <= depth).any():
                chosen = ChosenRows(view, room > depth)
            if not chosen.rows:
                break
            if depth:
                newest = self._steps.run(self._steps.batch(chosen.rows, depth, chosen.ones))
            else:
                newest = hidden[view.ship(batch.logit_index[chosen.lines])]
            length = chosen.known + depth
            if drawing:
                drafts, shaped = self._draw(newest, view, chosen, length, count)
                if drawn_from is None:
                    drawn_from = shaped.new_zeros(len(tokens), len(self._branching), shaped.shape[1])
                drawn_from[chosen.there, depth] = shaped
            else:
                drafts = choose_drafts(self._own.model.head, newest, view, chosen, length, count)
            tokens[chosen.there, depth] = drafts[:, 0]
            tokens[chosen.there, beside : beside + count - 1] = drafts[:, 1:]
            beside += count - 1
            view.tokens[chosen.index, length] = drafts[:, 0].clamp_min(0)  # read by the next pass, and by penalties
        if drawn_from is None:
            self._rule.forget(view.host_rows)
        else:
            self._rule.remember(view.host_rows, Draft(tokens, self._parents, drawn_from))
        return Draft(tokens.clamp_min(0), self._parents)

    def _note(self, rows: Sequence[int], room: np.ndarray) -> None:
        for row in rows if self._drafted else ():
            self._drafted.pop(row, None)
        if (room < self.ahead).any():
            self._drafted.update((row, int(slots)) for row, slots in zip(rows, room, strict=True) if slots < self.ahead)

    def _draw(
        self, hidden: Tensor, view: View, chosen: ChosenRows, length: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """(rows, count) drafts drawn without replacement, with numbers of their own, and the scores of the distribution
        that they were drawn from. A greedy row has one token to draw, and its next ones are the next best."""
        logits, table = self._own.model.head(hidden), view.sampling
        shaped = process(logits, chosen.index, table, view.tokens, length, None, chosen.rows)
        key = NumberKey(table.wholes[chosen.index, SEED], table.wholes[chosen.index, CHILD], length)
        drafts = draw_several(shaped, key, Purpose.DRAFT, count)
        if count > 1 and any(table.facts[row].greedy for row in chosen.rows):
            best = sample_several(logits, chosen.index, table, view.tokens, length, count, host_rows=chosen.rows)
            drafts = torch.where(table.wholes[chosen.index, GREEDY, None] > 0, best, drafts)
        return drafts, shaped.float()

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return self._rule.verify(scores, sampling)


def choose_drafts(
    head: LogitsHead, hidden: Tensor, view: View, chosen: ChosenRows, length: Tensor, count: int
) -> Tensor:
    """(rows, count) drafts for position `length`, drawn with the numbers that verification draws with."""
    facts = view.sampling.facts
    if count == 1 and all(facts[row] is PLAIN for row in chosen.rows):
        drafts = head.best(hidden)[:, None]
    else:
        drafts = sample_several(
            head(hidden), chosen.index, view.sampling, view.tokens, length, count, host_rows=chosen.rows
        )
    return drafts.clamp_min(0)


def size_of(model: Decoder) -> int:
    """A measure of a model's cost per token, for comparison with another one."""
    return len(model.blocks) * model.hidden**2


def check_branching(branching: Sequence[int]) -> tuple[int, ...]:
    """Raises ConfigError where a tree cannot be verified in one step."""
    if not branching or min(branching) < 1:
        raise ConfigError(
            f"branching={list(branching)} of the draft model is not a tree: give the number of drafts at each depth, "
            "each at least 1."
        )
    if sum(branching) >= TREE_TOKENS:
        raise ConfigError(
            f"The draft model's tree has {sum(branching)} draft tokens, but a step verifies at most "
            f"{TREE_TOKENS - 1}; lower its depth or branching."
        )
    return tuple(branching)


def tree_along_chain(branching: Sequence[int]) -> np.ndarray:
    """Parents of the drafts: first the chain of the best drafts, then the leaves beside it, by depth. A step that
    verifies fewer drafts leaves out leaves first."""
    chain = range(-1, len(branching) - 1)
    return np.array([*chain, *(depth - 1 for depth, count in enumerate(branching) for _ in range(count - 1))], np.int64)
