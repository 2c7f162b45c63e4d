"""Verification of drafts in a captured step, compared with the strategies' own rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bankfull.decode.strategy import DraftTree
from bankfull.decode.verify import accepted_path
from bankfull.ops.triton.accept import Accepted, accept_drafts, accepted_moves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINES, LONGEST, WIDTH, PAGE = 6, 90, 9, 4
SPARE = LINES - 1
"""The padding row of steps."""


def whole(*shape: int, below: int, seed: int) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def ship(numbers: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(numbers, np.int64))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("trees", (False, True), ids=("chains", "trees"))
def test_a_captured_step_accepts_and_appends_what_the_exact_rule_accepts(trees: bool, seed: int) -> None:
    """Few token ids, so that paths are long and drafts repeat; rows of unequal widths, one of them without drafts."""
    rows, widths = [3, 0, 4, 1], [WIDTH, 1, 5, 7]
    above = torch.stack([torch.tensor([0, *(int(whole(1, below=j, seed=seed + j)) for j in range(1, WIDTH))])] * LINES)
    if not trees:
        above = torch.arange(-1, WIDTH - 1).clamp_min(0).expand(LINES, -1).contiguous()
    drafts, sampled = whole(5 * WIDTH, below=2, seed=seed), whole(5 * WIDTH, below=2, seed=seed + 100)
    sampled[2 * WIDTH + 1] = -1  # no token could be chosen
    before, known = whole(LINES, LONGEST + 1, below=50, seed=9), torch.tensor([12, 20, 1, LONGEST - 2, 30, 0])
    state = [part.to(DEVICE, copy=True) for part in (before, known, known - 1)]
    found = Accepted(*(torch.full(shape, -7, device=DEVICE) for shape in ((5, WIDTH), (5, WIDTH), (5,))))
    lines = torch.tensor([*rows, SPARE], device=DEVICE)
    accept_drafts(
        lines,
        torch.tensor([*widths, 0], device=DEVICE),
        sampled.to(DEVICE),
        drafts.to(DEVICE),
        above.to(DEVICE) if trees else None,
        *state,
        found,
    )
    real = torch.cat([torch.arange(i * WIDTH, i * WIDTH + width) for i, width in enumerate(widths)])
    parents = torch.cat([above[row, :width] for row, width in zip(rows, widths, strict=True)])
    chosen = torch.full((4, WIDTH), -1)
    for i, width in enumerate(widths):
        chosen[i, :width] = sampled[i * WIDTH : i * WIDTH + width]
    path, counts = accepted_path(chosen, DraftTree(parents, drafts[real]), widths, ship)
    assert found.counts.tolist() == [*counts.tolist(), 1] and int(counts.max()) > 1
    expected, length = before.clone(), known.clone()
    for i, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        assert found.path[i, :count].tolist() == path[i, :count].tolist()
        tokens = chosen[i, path[i, :count]]
        assert found.tokens[i, :count].tolist() == tokens.tolist()
        at = (length[row] + torch.arange(count)).clamp_max(LONGEST)
        expected[row, at[: LONGEST + 1]] = tokens.clamp_min(0)
        length[row] += count
    assert torch.equal(state[1].cpu(), length) and torch.equal(state[2].cpu(), length - 1)
    assert torch.equal(state[0][:, :LONGEST].cpu(), expected[:, :LONGEST])
    assert torch.equal(state[0][SPARE].cpu(), before[SPARE]), "the padding row keeps its tokens"

    table = whole(LINES, -(-LONGEST // PAGE), below=1 << 20, seed=3) + 1
    moves = [torch.full((5, WIDTH - 1), -7, device=DEVICE) for _ in range(2)]
    accepted_moves(lines, found, state[2], table.to(DEVICE), PAGE, *moves)
    for i, (row, count) in enumerate(zip([*rows, SPARE], [*counts.tolist(), 1], strict=True)):
        begin = int(known[row]) - 1
        for move, nodes in zip(moves, (path[min(i, 3), :count], torch.arange(count)), strict=True):
            places = begin + nodes[1:]
            slots = torch.tensor([_slot(table[row], int(place)) for place in places], dtype=torch.long)
            assert torch.equal(move[i, : count - 1].cpu(), slots)
            assert not move[i, count - 1 :].any(), "the rest of a row is padding"


def _slot(table: torch.Tensor, place: int) -> int:
    page = int(table[place // PAGE]) if place // PAGE < len(table) else 0
    return page * PAGE + place % PAGE
