"""EAGLE-1, -2 and -3: a head of one layer continues the target model's features, as a chain or a tree of drafts.

The head's entry of a token reads the token's embedding and the feature of the token before it. Its keys and values lie
in the token's KV slot, so an entry depends only on the tokens up to its own, and pages of the prefix cache stay valid.
The first token of a sequence, and the first one after a cached prefix, have no feature: they read zeros.

`follow` runs the head over all tokens of a step with true features: prompt chunks, known tokens, and drafts, each with
its parent's feature. What a proposal wrote with predicted features is thereby replaced, and the accepted path is moved
with the target model's own. `propose` continues from the newest token with predicted features.

A tree's nodes lie in the KV slots after the newest token, one depth after the other. Each pass of a tree runs all nodes
so far, because only the tokens of a pass can be hidden from one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.candidate_tree import MOST_NODES
from bankfull.decode.draft import LOST, ChosenRows, choose_drafts, size_of
from bankfull.decode.growing_tree import GrowingTree
from bankfull.decode.strategy import ComputedStep, Draft, OwnModel, OwnSteps, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.layers.eagle import DraftLogits, EagleHead
from bankfull.ops.attention.body import TREE_TOKENS
from bankfull.sample.logits import sample_ranked
from bankfull.sample.table import PLAIN
from bankfull.types import Work

DYNAMIC, CHAIN = "dynamic", "chain"


class Eagle(Strategy):
    exact = True
    follows = True
    late = False

    def __init__(
        self,
        build: Callable[[Decoder], EagleHead],
        depth: int = 4,
        tree: str = CHAIN,
        nodes: int = 12,
        branch: int = 4,
    ) -> None:
        """`build`: makes the head for the target model. `depth`: drafts on a path, and passes of the head in a
        proposal. `tree`: dynamic (EAGLE-2), or chain. `nodes`: draft tokens of a tree. `branch`: candidates of a node,
        and nodes of a depth that are continued."""
        if tree not in (DYNAMIC, CHAIN):
            raise ConfigError(f"tree={tree[:40]!r} is unknown; use {DYNAMIC!r} or {CHAIN!r}.")
        if not 1 <= depth <= MOST_NODES:
            raise ConfigError(f"depth={depth} is not possible; choose 1 to {MOST_NODES} draft tokens on a path.")
        self._build, self._depth, self._branch = build, depth, branch
        self.trees = tree == DYNAMIC
        self._nodes = depth
        self.ahead = depth
        if self.trees:
            if branch < 1 or branch * (depth - 1) >= TREE_TOKENS:
                raise ConfigError(
                    f"A tree of depth {depth} that continues {branch} nodes per depth is too large: the head runs "
                    f"branch * (depth - 1) nodes at once, at most {TREE_TOKENS - 1}; lower depth or branch."
                )
            self._nodes = min(nodes, branch + branch * branch * (depth - 1))
            if not 1 <= nodes <= MOST_NODES:
                raise ConfigError(f"nodes={nodes} is not possible; choose 1 to {MOST_NODES} draft tokens.")
            self.ahead = 1 + branch * (depth - 1)
        self._head: EagleHead | None = None
        self._fresh: set[int] = set()
        """Rows whose last token's feature is not known: they have entered or were skipped since the last step."""
        self._followed: set[int] = set()
        """Rows whose newest step was followed."""
        self._skipped: dict[int, int] = {}
        """Number of tokens without an entry, since their steps were not followed, by row."""

    @property
    def own(self) -> OwnModel | None:
        return None if self._head is None else OwnModel(self._head.model, self._logits.build.kit, reads_features=True)

    @property
    def _logits(self) -> DraftLogits:
        assert self._head is not None, "the strategy runs with a model"
        head = self._head.model.head
        assert isinstance(head, DraftLogits)
        return head

    def prepare(self, target: Decoder) -> None:
        self._head = self._build(target)
        self.share = size_of(self._head.model) / size_of(target)
        self.taps = self._head.taps
        self._branch = min(self._branch, self._logits.candidates)
        if self.trees:
            self._nodes = min(self._nodes, self._branch + self._branch**2 * (self._depth - 1))

    def attach(self, steps: OwnSteps) -> None:
        build = self._logits.build
        self._steps = steps
        assert self._head is not None
        self._last = torch.zeros(steps.lines, self._head.model.hidden, dtype=build.dtype, device=build.device)
        """(rows) the feature of each row's last computed token."""

    def width(self, load: int) -> int:
        return self._nodes

    def begin(self, rows: Sequence[int]) -> None:
        self._fresh.update(rows)
        self._followed.difference_update(rows)
        for row in rows if self._skipped else ():
            self._skipped.pop(row, None)

    def skip(self, rows: Sequence[int]) -> None:
        """The features of a skipped token are gone. Its entry is made later, without a feature (`_catch_up`)."""
        self._fresh.update(rows)
        for row in rows:
            if row in self._followed:
                self._followed.discard(row)
            else:
                self._skipped[row] = self._skipped.get(row, 0) + 1

    def miss(self, work: Sequence[Work]) -> None:
        self._fresh.update(w.row for w in work)
        for w in work:
            # With drafts, only the device knows how many of them are accepted, and where the rest lies.
            self._skipped[w.row] = self._skipped.get(w.row, 0) + (LOST if w.drafts else w.count)

    def behind(self, row: int) -> int:
        count = self._skipped.get(row, 0)
        return -1 if count >= LOST else count

    def _catch_up(self, rows: Sequence[int]) -> None:
        """Make the entries of skipped tokens, before the one that the last step has run. Keys and values of a single
        layer do not depend on other entries, so they may come late."""
        for row in rows:
            if 0 < (count := self._skipped.pop(row, 0)) < LOST:
                batch = self._steps.batch([row], -1 - count, [count])
                batch.features = self._last.new_zeros(count, self._last.shape[1])
                self._steps.run(batch)

    def follow(self, step: ComputedStep) -> None:
        assert self._head is not None
        self._features = self._head.features(step.hidden, step.tapped)
        batch, work = step.batch, step.work
        known = batch.q_start[:-1] + [w.count - 1 for w in work]
        fresh = [w.row in self._fresh for w in work]
        rows, first, last, new = step.ship(np.stack(([w.row for w in work], batch.q_start[:-1], known, fresh)))
        self._fresh.difference_update(w.row for w in work)
        self._followed.update(w.row for w in work)
        for w in work if self._skipped else ():
            if w.count > 1 or w.drafts:  # only the device knows how many of them are accepted, and where the rest lies
                self._skipped.pop(w.row, None)
        earlier = self._last[rows].masked_fill_((new > 0)[:, None], 0)
        before = self._features[step.before.clamp_min(0)]
        batch.features = before.index_copy_(0, first, earlier)
        self._steps.run(batch)
        self._last.index_copy_(0, rows, self._features[last])

    def propose(self, view: View) -> Draft | None:
        self._followed.difference_update(view.host_rows)
        if self._skipped:
            self._catch_up(view.host_rows)
        newest = view.at_newest(self._features)
        self._last.index_copy_(0, view.rows, newest)
        room = self._steps.room(view.host_rows, self.ahead)
        return self._tree(view, newest, room) if self.trees else Draft(self._chain(view, newest, room))

    def _chain(self, view: View, feature: Tensor, room: np.ndarray) -> Tensor:
        """(rows, depth) the chain of the rows with as many KV slots."""
        depth, whole = min(self._depth, view.width), len(view.host_rows)
        tokens = view.tokens.new_zeros(whole, self._depth)
        for most in sorted({*np.minimum(room, depth).tolist()} - {0}):  # rows with as many slots, together
            chosen = ChosenRows(view, np.minimum(room, depth) == most)
            states = feature if len(chosen.rows) == whole else feature[chosen.there]
            places = self._steps.ahead(chosen.rows, most)
            newest = places.tokens[:, :1]
            for place in range(most):
                batch = places.batch(place, 1, newest)
                batch.features = states
                states = self._steps.run(batch)
                newest = choose_drafts(self._logits, states, view, chosen, chosen.known + place, 1)
                tokens[chosen.there, place] = newest[:, 0]
                view.tokens[chosen.index, chosen.known + place] = newest[:, 0]  # penalties read it
        return tokens

    def _tree(self, view: View, newest: Tensor, room: np.ndarray) -> Draft:
        """The best nodes of a tree that grows by the most likely candidates of each depth. The confidence of a node is
        the product of the probabilities on its path. Rows without KV slots for it, as those near their end, get a
        narrower one, or a chain."""
        tokens = view.tokens.new_zeros(len(view.host_rows), self._nodes)
        parents = torch.arange(-1, self._nodes - 1, device=tokens.device).repeat(len(tokens), 1)
        # A tree that continues k nodes of each depth takes 1 + k * (depth - 1) slots.
        widths = np.minimum((room - 1) // max(1, self._depth - 1), self._branch)
        widths = np.where(room < self._depth, 0, self._branch if self._depth == 1 else widths)
        if ((room > 0) & (widths == 0)).any():
            most = min(self._depth, self._nodes)
            tokens[:, :most] = self._chain(view, newest, np.where(widths > 0, 0, room))[:, :most]
        for width in sorted({*widths.tolist()} - {0}):
            chosen = ChosenRows(view, widths == width)
            nodes, above = self._grown(view, chosen, newest[chosen.there], width)
            tokens[chosen.there, : nodes.shape[1]], parents[chosen.there, : nodes.shape[1]] = nodes, above
        return Draft(tokens, parents)

    def _grown(self, view: View, chosen: ChosenRows, feature: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(rows, nodes) tokens and parents of a tree that continues k nodes of each depth; nodes may be fewer."""
        rows = len(chosen.rows)
        places = self._steps.ahead(chosen.rows, 1 + k * (self._depth - 1))
        batch = places.batch(0, 1, places.tokens[:, :1])
        batch.features = feature
        states = self._steps.run(batch)
        tree = GrowingTree(*self._ranked(states, view, chosen, chosen.known, 1, k))
        states, inputs = states[:, None], list[Tensor]()
        line = torch.arange(rows, device=feature.device)[:, None]
        for depth in range(1, self._depth):
            up = tree.expand()
            inputs.append(states.expand(rows, k, -1) if up is None else states[line, up])
            batch = places.batch(1, depth * k, tree.tokens)
            batch.positions = (chosen.known[:, None] - 1 + tree.depths).flatten()
            batch.ancestors = tree.masks.flatten()
            batch.features = torch.cat(inputs, 1).flatten(0, 1)
            states = self._steps.run(batch).view(rows, depth * k, -1)
            tree.add(*self._ranked(states[:, -k:].flatten(0, 1), view, chosen, chosen.known + depth, k, k))
        return tree.best(self._nodes)

    def _ranked(
        self, features: Tensor, view: View, chosen: ChosenRows, length: Tensor, lines: int, k: int
    ) -> tuple[Tensor, Tensor]:
        """(rows * lines, k) tokens and log-probabilities of the candidates for position `length`, after `lines`
        nodes of each row. Sampled rows draw with the numbers of verification."""
        facts = view.sampling.facts
        if all(facts[row] is PLAIN for row in chosen.rows):
            confidence, ids = self._logits.highest(features, k)
            return ids, confidence
        ids, confidence = sample_ranked(
            self._logits(features),
            chosen.index.repeat_interleave(lines),
            view.sampling,
            view.tokens,
            length.repeat_interleave(lines),
            k,
            host_rows=[row for row in chosen.rows for _ in range(lines)],
        )
        return ids.clamp_min(0), confidence.float()

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)
