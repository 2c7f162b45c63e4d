"""Trees of candidates: the best one for every number of nodes, and how many of its nodes are accepted."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from bankfull.decode.candidate_tree import (
    MOST_NODES,
    USUAL_ACCEPTANCE,
    CandidateTree,
    accepted_nodes,
    best_tree,
    chain_tree,
    expected_tokens,
)
from bankfull.errors import ConfigError


def random_table(rng: random.Random, heads: int, ranks: int) -> list[list[float]]:
    """Frequencies of which each head's sum is at most 1, in no order."""
    table = []
    for _ in range(heads):
        shares = [rng.random() for _ in range(ranks + 1)]
        table.append([share / sum(shares) for share in shares[:ranks]])
    return table


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("nodes", (1, 2, 3, 4))
def test_no_tree_of_the_same_size_accepts_more(seed: int, nodes: int) -> None:
    table = random_table(random.Random(seed), heads=3, ranks=2)
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]

    def value(path: tuple[int, ...]) -> float:
        return float(np.prod([table[head][rank] for head, rank in enumerate(path)]))

    closed = (
        chosen
        for chosen in itertools.combinations(paths, nodes)
        if all(path[:-1] in chosen for path in chosen if len(path) > 1)
    )
    most = max(sum(map(value, chosen)) for chosen in closed)
    assert expected_tokens(best_tree(table, nodes), table) == pytest.approx(1 + most)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_nodes_of_a_tree_are_the_best_smaller_tree(seed: int) -> None:
    table = random_table(random.Random(seed), heads=5, ranks=10)
    whole = best_tree(table, MOST_NODES)
    assert len(whole) == MOST_NODES
    for nodes in range(1, MOST_NODES):
        smaller, cut = best_tree(table, nodes), whole.first(nodes)
        assert all((a == b).all() for a, b in zip(parts(smaller), parts(cut), strict=True))


def parts(tree: CandidateTree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tree.parents, tree.heads, tree.ranks


@pytest.mark.parametrize("seed", range(8))
def test_a_tree_is_a_tree(seed: int) -> None:
    rng = random.Random(seed)
    tree = best_tree(random_table(rng, rng.randint(1, 6), rng.randint(1, 10)), rng.randint(1, MOST_NODES))
    assert (tree.parents < np.arange(len(tree))).all() and tree.parents.min() == -1
    for node, parent in enumerate(tree.parents):
        assert tree.heads[node] == (0 if parent < 0 else tree.heads[parent] + 1)
    siblings = list(zip(tree.parents.tolist(), tree.ranks.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings), "a candidate stands twice beside itself"
    assert tree.depth == tree.heads.max() + 1 and tree.widest == tree.ranks.max() + 1


@pytest.mark.parametrize("seed", range(4))
def test_accepted_nodes_are_those_on_the_path_of_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    tree = best_tree(random_table(rng, 4, 3), 20)
    children = {
        (parent, rank): node
        for node, (parent, rank) in enumerate(zip(tree.parents.tolist(), tree.ranks.tolist(), strict=True))
    }
    ranks = torch.tensor([[rng.randrange(4) for _ in range(4)] for _ in range(200)])
    for line, accepted in zip(ranks.tolist(), accepted_nodes(tree, ranks).tolist(), strict=True):
        node, count = -1, 0
        for rank in line:
            if (node, rank) not in children:
                break
            node, count = children[node, rank], count + 1
        assert accepted == count


def test_independent_heads_accept_as_many_tokens_as_expected() -> None:
    table = [[0.5, 0.2], [0.4, 0.3], [0.3, 0.1]]
    generator = torch.Generator().manual_seed(1)
    columns = [
        torch.multinomial(torch.tensor([*chances, 1 - sum(chances)]), 200_000, True, generator=generator)
        for chances in table
    ]
    tree = best_tree(table, 9)
    measured = 1 + float(accepted_nodes(tree, torch.stack(columns, 1)).double().mean())
    assert measured == pytest.approx(expected_tokens(tree, table), abs=0.01)


def test_a_chain_takes_the_first_candidate_of_each_head() -> None:
    chain = chain_tree(4)
    assert chain.is_chain and chain.depth == 4 and chain.widest == 1
    assert not best_tree(USUAL_ACCEPTANCE[:4], 16).is_chain


def test_candidates_that_were_never_right_are_left_out() -> None:
    assert len(best_tree([[0.5, 0.0], [0.0, 0.0]], 10)) == 1
    assert len(best_tree([[0.0, 0.0]], 10)) == 1, "a strategy needs one draft at least"


@pytest.mark.parametrize("nodes", (0, -3, MOST_NODES + 1))
def test_an_impossible_number_of_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(ConfigError, match=f"{nodes} draft tokens is not possible; choose 1 to {MOST_NODES}"):
        best_tree(USUAL_ACCEPTANCE, nodes)


@pytest.mark.parametrize("table", ([], [[0.5, 1.5]], [[-0.1]], [[float("nan")]]))
def test_a_table_that_holds_no_frequencies_is_refused(table: list[list[float]]) -> None:
    with pytest.raises(ConfigError, match="frequencies between 0 and 1"):
        best_tree(table, 4)
