"""The rejection rule has the target's distribution: for chains and trees, sampled and deterministic drafts, truncated
targets. The target and the drafter are tables: the distribution after a token depends on that token alone."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch
from torch import Tensor

from bankfull.decode.rejection import NO_NODE, AcceptedPath, accept_chain, accept_tree, draft_children
from bankfull.sample.draw import NO_TOKEN, draw, draw_several
from bankfull.sample.random import NumberKey, Purpose

VOCAB = 6
LINES = 16_000
START = 0
"""The last known token of each line."""


def scores_table(seed: int, spread: float = 1.5) -> Tensor:
    """Scores after each token [token before, token]."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def truncated(scores: Tensor, kept: int) -> Tensor:
    return scores.masked_fill(scores < scores.topk(kept).values[:, -1:], -torch.inf)


def keys(lines: int = LINES, seed: int = 3) -> NumberKey:
    still = torch.zeros(lines, dtype=torch.int64)
    return NumberKey(still + seed, still, torch.arange(lines) * 16)


def moved(key: NumberKey, by: int | Tensor) -> NumberKey:
    return NumberKey(key.seed, key.child, key.position + by)


class Drafted:
    """Drafts of every line: a tree whose nodes at depth d have `widths[d]` children."""

    def __init__(self, drafter: Tensor, widths: list[int], key: NumberKey, *, top: bool = False) -> None:
        lines = len(key.seed)
        last = torch.full((lines,), START)
        level = [(NO_NODE, last)]
        tokens: list[Tensor] = []
        parents: list[int] = []
        for depth, width in enumerate(widths):
            following = []
            for parent, before in level:
                after = drafter[before]
                found = after.topk(width).indices if top else draft_children(after, moved(key, depth), width)
                for child in found.unbind(1):
                    following.append((len(tokens), child))
                    tokens.append(child)
                    parents.append(parent)
            level = following
        self.tokens = torch.stack(tokens, 1)
        self.parents = torch.tensor(parents).expand(lines, -1)
        self.lines_before = torch.cat((last[:, None], self.tokens), 1).clamp_min(0)
        self.probs = None if top else drafter.softmax(-1)[self.lines_before]

    def accept(self, target: Tensor, key: NumberKey) -> AcceptedPath:
        return accept_tree(target[self.lines_before], self.tokens, self.parents, self.probs, key)


def first_two(path: AcceptedPath, target: Tensor, key: NumberKey) -> Tensor:
    """The first two tokens of each line; the second is drawn as in plain decoding where only one came."""
    first = path.tokens[:, 0]
    drawn = draw(target[first], moved(key, 1), Purpose.TOKEN)
    return torch.stack((first, torch.where(path.counts > 1, path.tokens[:, 1], drawn)), 1)


def fits(pairs: Tensor, target: Tensor) -> float:
    """The p-value of a G-test of the joint distribution of two tokens against the target's."""
    probs = target.softmax(-1)
    joint = (probs[START][:, None] * probs).flatten().numpy()
    counts = np.bincount((pairs[:, 0] * VOCAB + pairs[:, 1]).numpy(), minlength=VOCAB * VOCAB)
    assert counts[joint == 0].sum() == 0, "a token outside of the truncated target"
    alive = joint > 0
    expected = joint[alive] / joint[alive].sum() * len(pairs)
    return float(scipy.stats.power_divergence(counts[alive], expected, lambda_="log-likelihood").pvalue)


@pytest.mark.parametrize("widths", [[1], [1, 1, 1], [3], [2, 2], [3, 1, 2], [5]], ids=str)
@pytest.mark.parametrize("kind", ["sampled", "top", "truncated", "truncated top"])
def test_tokens_have_the_distribution_of_the_target(widths: list[int], kind: str) -> None:
    target, drafter = scores_table(1), scores_table(2)
    if kind.startswith("truncated"):
        target, drafter = truncated(target, 3), truncated(drafter, 5)
    key = keys()
    path = Drafted(drafter, widths, key, top=kind.endswith("top")).accept(target, key)
    assert fits(first_two(path, target, key), target) > 1e-4


def test_the_test_finds_a_wrong_rule() -> None:
    """Accepting with another drafter's probabilities: the G-test must fail."""
    target, key = scores_table(1), keys()
    drafts = Drafted(scores_table(2), [1, 1], key)
    drafts.probs = scores_table(5).softmax(-1)[drafts.lines_before]
    assert fits(first_two(drafts.accept(target, key), target, key), target) < 1e-6


@pytest.mark.parametrize("widths", [[1, 1, 1, 1], [2, 2]], ids=str)
def test_a_drafter_equal_to_the_target_is_accepted_whole(widths: list[int]) -> None:
    target, key = scores_table(4), keys(4000)
    path = Drafted(target, widths, key).accept(target, key)
    assert (path.counts == len(widths) + 1).all()


def test_the_share_of_accepted_drafts_is_the_overlap() -> None:
    target, drafter, key = scores_table(1), scores_table(2), keys()
    path = Drafted(drafter, [1], key).accept(target, key)
    p, q = target.softmax(-1)[START], drafter.softmax(-1)[START]
    assert scipy.stats.binomtest(int((path.counts == 2).sum()), LINES, float(torch.minimum(p, q).sum())).pvalue > 1e-4
    path = Drafted(drafter, [1], key, top=True).accept(target, key)
    assert scipy.stats.binomtest(int((path.counts == 2).sum()), LINES, float(p[q.argmax()])).pvalue > 1e-4


@pytest.mark.parametrize("drafter", ["uniform", "point", "disjoint"])
def test_hostile_drafters_change_nothing(drafter: str) -> None:
    target, key = truncated(scores_table(1), 3), keys()
    made = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    if drafter == "point":
        made = torch.full_like(made, -torch.inf)
        made[:, 2] = 0.0
    elif drafter == "disjoint":
        made = made.masked_fill(target > -torch.inf, -torch.inf)
    path = Drafted(made, [2, 1], key).accept(target, key)
    assert fits(first_two(path, target, key), target) > 1e-4
    if drafter == "disjoint":
        assert (path.counts == 1).all()


def test_a_greedy_target_accepts_its_own_token_only() -> None:
    best = scores_table(1).argmax(-1)
    target = torch.full((VOCAB, VOCAB), -torch.inf, dtype=torch.float64).scatter(1, best[:, None], 0.0)
    key = keys(2000)
    drafts = Drafted(scores_table(1), [2, 2], key)
    path = drafts.accept(target, key)
    expected, last = [], START
    for _ in range(3):
        last = int(best[last])
        expected.append(last)
    for line in range(0, 2000, 97):
        count = int(path.counts[line])
        assert path.tokens[line, :count].tolist() == expected[:count]
    assert (path.counts == 3).any() and (path.counts == 1).any()


def test_the_path_names_the_accepted_nodes() -> None:
    target, key = scores_table(1), keys(2000)
    drafts = Drafted(scores_table(6, 0.7), [3, 2], key)
    path = drafts.accept(target, key)
    assert path.counts.unique().tolist() == [1, 2, 3]
    for line in range(2000):
        count, nodes = int(path.counts[line]), path.nodes[line].tolist()
        parent = NO_NODE
        for place in range(count - 1):
            assert drafts.parents[line, nodes[place]] == parent
            assert drafts.tokens[line, nodes[place]] == path.tokens[line, place]
            parent = nodes[place]
        assert set(nodes[count - 1 :]) == {NO_NODE} and set(path.tokens[line, count:].tolist()) <= {NO_TOKEN}
        assert path.tokens[line, count - 1] >= 0


def test_a_line_is_decided_alone_and_padding_is_never_tried() -> None:
    target, key = scores_table(1), keys(64)
    drafts = Drafted(scores_table(2), [2, 2], key)
    whole = drafts.accept(target, key)
    scores, probs = target[drafts.lines_before], drafts.probs
    assert probs is not None
    for line in range(0, 64, 5):
        at = slice(line, line + 1)
        alone = accept_tree(
            torch.nn.functional.pad(scores[at], (0, 0, 0, 1)),
            torch.nn.functional.pad(drafts.tokens[at], (0, 1), value=NO_TOKEN),
            torch.nn.functional.pad(drafts.parents[at], (0, 1), value=NO_NODE),
            torch.nn.functional.pad(probs[at], (0, 0, 0, 1)),
            NumberKey(*(part[at] for part in key)),
        )
        count = int(whole.counts[line])
        assert int(alone.counts) == count
        assert alone.tokens[0, :count].tolist() == whole.tokens[line, :count].tolist()


def test_a_chain_is_a_tree_with_one_branch_and_no_drafts_give_one_token() -> None:
    target, key = scores_table(1), keys(500)
    drafts = Drafted(scores_table(2), [1, 1, 1], key)
    tree, chain = (
        drafts.accept(target, key),
        accept_chain(target[drafts.lines_before], drafts.tokens, drafts.probs, key),
    )
    assert torch.equal(tree.tokens, chain.tokens) and torch.equal(tree.nodes, chain.nodes)
    nothing = torch.empty(500, 0, dtype=torch.int64)
    alone = accept_chain(target[START].expand(500, 1, -1), nothing, None, key)
    assert alone.tokens.shape == (500, 1) and (alone.counts == 1).all()
    spoilt = torch.full((500, 1, VOCAB), torch.nan)
    assert (accept_chain(spoilt, nothing, None, key).tokens == NO_TOKEN).all()


def test_several_draws_are_without_replacement_in_order() -> None:
    scores = scores_table(3)[START]
    found = draw_several(scores.expand(LINES, -1), keys(), Purpose.DRAFT, 2)
    assert torch.equal(found[:, 0], draw(scores.expand(LINES, -1), keys(), Purpose.DRAFT))
    assert (found[:, 0] != found[:, 1]).all()
    p = scores.softmax(-1).numpy()
    joint = p[:, None] * p[None, :] / (1 - p[:, None])
    np.fill_diagonal(joint, 0.0)
    counts = np.bincount((found[:, 0] * VOCAB + found[:, 1]).numpy(), minlength=VOCAB * VOCAB)
    alive = joint.ravel() > 0
    assert scipy.stats.chisquare(counts[alive], joint.ravel()[alive] * LINES).pvalue > 1e-4
    few = draw_several(truncated(scores.expand(4, -1), 2), keys(4), Purpose.DRAFT, 9)
    assert few.shape == (4, 9) and (few[:, :2] >= 0).all() and (few[:, 2:] == NO_TOKEN).all()
