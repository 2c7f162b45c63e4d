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
from bankfull.decode.draft import ChosenRows, choose_drafts
from bankfull.decode.strategy import ComputedStep, Draft, OwnModel, OwnSteps, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.layers.eagle import DraftLogits, EagleHead
from bankfull.ops.reference.attention import TREE_TOKENS
from bankfull.sample.logits import sample_ranked
from bankfull.sample.table import PLAIN
from bankfull.state.spec import Recurrent

DYNAMIC, CHAIN = "dynamic", "chain"


class Eagle(Strategy):
    exact = True
    follows = True

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
        if self.trees and any(isinstance(state, Recurrent) for states in target.states() for state in states):
            raise ConfigError(
                "A model with recurrent state verifies chains of draft tokens only, and this head proposes a tree; "
                f"add tree={CHAIN}."
            )
        self._head = self._build(target)
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

    def skip(self, rows: Sequence[int]) -> None:
        """The features of a skipped token are gone. Its KV slot stays without an entry, so drafts of these rows are
        worse until their sequences end."""
        self._fresh.update(rows)

    def follow(self, step: ComputedStep) -> None:
        assert self._head is not None
        self._features = self._head.features(step.hidden, step.tapped)
        batch, work = step.batch, step.work
        known = batch.q_start[:-1] + [w.count - 1 for w in work]
        fresh = [w.row in self._fresh for w in work]
        rows, first, last, new = step.ship(np.stack(([w.row for w in work], batch.q_start[:-1], known, fresh)))
        self._fresh.difference_update(w.row for w in work)
        earlier = self._last[rows].masked_fill_((new > 0)[:, None], 0)
        before = self._features[step.before.clamp_min(0)]
        batch.features = before.index_copy_(0, first, earlier)
        self._steps.run(batch)
        self._last.index_copy_(0, rows, self._features[last])

    def propose(self, view: View) -> Draft | None:
        newest = view.at_newest(self._features)
        self._last.index_copy_(0, view.rows, newest)
        room = self._steps.room(view.host_rows, self.ahead)
        return self._tree(view, newest, room) if self.trees else Draft(self._chain(view, newest, room))

    def _chain(self, view: View, feature: Tensor, room: np.ndarray) -> Tensor:
        """(rows, depth) the chain of the rows with as many KV slots."""
        tokens = view.tokens.new_zeros(len(view.host_rows), self._depth)
        features = torch.zeros_like(feature) if (room < self._depth).any() else feature
        for depth in range(min(self._depth, view.width)):
            chosen = ChosenRows(view, room > depth)
            if not chosen.rows:
                break
            batch = self._steps.batch(chosen.rows, depth, chosen.ones)
            every = len(chosen.rows) == len(view.host_rows)
            batch.features = feature if every else feature[chosen.there]
            found_features = self._steps.run(batch)
            found = choose_drafts(self._logits, found_features, view, chosen, chosen.known + depth, 1)[:, 0]
            tokens[chosen.there, depth] = found
            view.tokens[chosen.index, chosen.known + depth] = found  # read by the next pass, and by penalties
            feature = found_features if every else features.index_copy(0, chosen.there, found_features)
        return tokens

    def _tree(self, view: View, newest: Tensor, room: np.ndarray) -> Draft:
        """The best nodes of a tree that grows by the most likely candidates of each depth. The confidence of a node is
        the product of the probabilities on its path. Rows without KV slots for it, as those near their end, get a
        chain."""
        tokens = view.tokens.new_zeros(len(view.host_rows), self._nodes)
        parents = torch.arange(-1, self._nodes - 1, device=tokens.device).repeat(len(tokens), 1)
        grows = room >= self.ahead
        if ((room > 0) & ~grows).any():
            most = min(self._depth, self._nodes)
            tokens[:, :most] = self._chain(view, newest, np.where(grows, 0, room))[:, :most]
        if grows.any():
            chosen = ChosenRows(view, grows)
            found, above = self._grown(view, chosen, newest[chosen.there])
            tokens[chosen.there], parents[chosen.there] = found, above
        return Draft(tokens, parents)

    def _grown(self, view: View, chosen: ChosenRows, feature: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, nodes) tokens and parents."""
        rows, k = len(chosen.rows), self._branch
        batch = self._steps.batch(chosen.rows, 0, chosen.ones)
        batch.features = feature
        features = self._steps.run(batch)  # of the nodes that the next candidates come after
        confidence, ids = self._ranked(features, view, chosen, chosen.known, 1)
        ids, chances = ids.view(rows, k), confidence.view(rows, k)
        above = torch.full_like(ids, -1)
        """Parents: numbers of candidates."""
        line = torch.arange(rows, device=ids.device)[:, None]
        every = [(ids, chances, above)]
        count = 0
        """Candidates before those of this depth."""
        run = ids.new_zeros(rows, 0)
        """Candidates that have run, in the order of their KV slots."""
        inputs = feature.new_zeros(rows, 0, feature.shape[1])
        depths: list[int] = []
        masks, bit = ids.new_zeros(rows, 0), torch.ones_like(ids[:1])
        slot_of = ids.new_zeros(rows, k + k * k * (self._depth - 1))
        """Of each candidate that has run: its place among those."""
        parent_features = features.view(rows, 1, -1)
        for depth in range(1, self._depth):
            best = chances.topk(k, -1).indices if depth > 1 else torch.arange(k, device=ids.device).expand(rows, k)
            new, up = ids.gather(1, best), above.gather(1, best)
            slots = torch.arange(run.shape[1], run.shape[1] + k, device=ids.device).expand(rows, k)
            slot_of = slot_of.scatter(1, count + best, slots)
            own = bit << slots
            if depth == 1:
                before, mask = parent_features.expand(rows, k, -1), own
            else:
                parent_slot = slot_of.gather(1, up)
                before, mask = parent_features[line, parent_slot], own | masks.gather(1, parent_slot)
            run = torch.cat((run, count + best), 1)
            inputs, masks = torch.cat((inputs, before), 1), torch.cat((masks, mask), 1)
            depths += [depth] * k
            view.tokens[chosen.index[:, None], chosen.known[:, None] + slots] = new
            total = run.shape[1]
            batch = self._steps.batch(chosen.rows, 1, np.full(rows, total))
            after = chosen.known[:, None] + view.ship(np.array(depths) - 1)
            batch.positions, batch.ancestors = after.reshape(-1), masks.reshape(-1)
            batch.features = inputs.reshape(rows * total, -1)
            parent_features = self._steps.run(batch).view(rows, total, -1)
            newest = parent_features[:, total - k :].reshape(rows * k, -1)
            confidence, found = self._ranked(newest, view, chosen, chosen.known + depth, k)
            count += ids.shape[1]
            chances = (chances.gather(1, best)[:, :, None] + confidence.view(rows, k, k)).view(rows, k * k)
            above = (count - ids.shape[1] + best)[:, :, None].expand(rows, k, k).reshape(rows, k * k)
            ids = found.view(rows, k * k)
            every.append((ids, chances, above))
        ids, chances, above = (torch.cat(part, 1) for part in zip(*every, strict=True))
        return _kept(ids, chances, above, self._nodes)

    def _ranked(
        self, features: Tensor, view: View, chosen: ChosenRows, length: Tensor, lines: int
    ) -> tuple[Tensor, Tensor]:
        """(rows * lines, branch) log-probabilities and tokens of the candidates for position `length`, after `lines`
        nodes of each row. Sampled rows draw with the numbers of verification."""
        k, facts = self._branch, view.sampling.facts
        if all(facts[row] is PLAIN for row in chosen.rows):
            return self._logits.highest(features, k)
        ids, confidence = sample_ranked(
            self._logits(features),
            chosen.index.repeat_interleave(lines),
            view.sampling,
            view.tokens,
            length.repeat_interleave(lines),
            k,
            host_rows=[row for row in chosen.rows for _ in range(lines)],
        )
        return confidence.float(), ids.clamp_min(0)

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)


def _kept(ids: Tensor, chances: Tensor, above: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """(rows, nodes) tokens and parents of the most confident candidates. A child is at most as confident as its parent
    and comes after it, so a stable order keeps every parent before its children."""
    certain = chances.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    order = certain.sort(dim=-1, descending=True, stable=True).indices
    number = torch.arange(order.shape[1], device=order.device).expand_as(order)
    places = torch.empty_like(order).scatter_(1, order, number)
    kept = order[:, :nodes]
    up = above.gather(1, kept)
    return ids.gather(1, kept), torch.where(up < 0, up, places.gather(1, up.clamp_min(0)))
