"""Input and output of a captured step: gathered from rows, and appended to them, compared with plain Python."""

from __future__ import annotations

import pytest
import torch

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import rope_angles
from bankfull.ops.triton.steps import BLOCK, RopeAngles, StepTrees, append_tokens, gather_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LINES, LONGEST = 5, 700
SPARE = LINES - 1
"""The padding row of steps."""


def whole(*shape: int, below: int = 1 << 30, seed: int = 0) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("width", "trees"), [(1, False), (3, False), (5, True)])
@pytest.mark.parametrize("page_tokens", [(), (4,), (4, 16)], ids=str)
def test_a_step_is_gathered_from_its_rows(width: int, trees: bool, page_tokens: tuple[int, ...]) -> None:
    tokens = whole(LINES, LONGEST + 1)
    reached = torch.tensor([5, 0, LONGEST - width, 17, 0], device=DEVICE)
    tables = [whole(LINES, -(-LONGEST // page), seed=page) for page in page_tokens]
    lines = torch.tensor([2, 0, 3, SPARE], device=DEVICE)
    assert not tables or tables[0].shape[1] > BLOCK, "one block is not enough for the longest"
    total = len(lines) * width
    ids, positions = whole(total), whole(total)
    lengths = torch.zeros(len(lines), dtype=torch.int32, device=DEVICE)
    slots, pages = [whole(total) for _ in tables], [torch.full_like(table[: len(lines)], -7) for table in tables]
    frequencies = 1.0 / 10000 ** (torch.arange(5, device=DEVICE) / 5)
    depths, masks, ancestors = whole(LINES, 9, below=5), whole(LINES, 9, seed=2), whole(total)
    cos, sin = (torch.full((total, 5), 7.0, dtype=torch.float16, device=DEVICE) for _ in range(2))
    gather_step(
        lines,
        tokens,
        reached,
        tables,
        page_tokens,
        width,
        (ids, positions, lengths),
        slots,
        pages,
        RopeAngles(frequencies, 1.25, cos, sin),
        StepTrees(depths, masks, ancestors) if trees else None,
    )
    assert not trees or torch.equal(ancestors.view(-1, width), masks[lines, :width])
    expected = rope_angles.providers["triton"].run(positions, frequencies, 1.25, torch.float16)
    assert torch.equal(cos, expected[0]) and torch.equal(sin, expected[1])
    for i, line in enumerate(lines.tolist()):
        first = int(reached[line])
        assert int(lengths[i]) == first + width
        for j in range(width):
            at, own = first + j, i * width + j
            depth = int(depths[line, j]) if trees else j
            assert (int(positions[own]), int(ids[own])) == (first + depth, int(tokens[line, at]))
            for group, page in enumerate(page_tokens):
                assert int(slots[group][own]) == int(tables[group][line, at // page]) * page + at % page
        for group, page in enumerate(page_tokens):
            used = -(-(first + width) // page)
            assert torch.equal(pages[group][i, :used], tables[group][line, :used])
            assert bool((pages[group][i, used:] == -7).all()), "a table is copied as far as it is used"


def test_tokens_are_appended_to_their_rows() -> None:
    """A row without a token gets a valid one; beyond the end, the last position is overwritten."""
    before = whole(LINES, LONGEST + 1)
    tokens = before.clone()
    known = torch.tensor([3, 9, LONGEST + 4, 1, 2], device=DEVICE)
    reached = torch.tensor([2, 8, LONGEST, 0, 1], device=DEVICE)
    lines, chosen = torch.tensor([2, 0, 3, SPARE], device=DEVICE), torch.tensor([11, -1, 13, 14], device=DEVICE)
    told, turn = torch.full((3, 6), -7, device=DEVICE), torch.tensor([2], device=DEVICE)
    append_tokens(lines, chosen, tokens, known, reached, told, turn)
    expected = before.clone()
    expected[2, LONGEST], expected[0, 3], expected[3, 1] = 11, 0, 13
    assert torch.equal(tokens, expected)
    assert known.tolist() == [4, 9, LONGEST + 5, 2, 2]
    assert reached.tolist() == [3, 8, LONGEST + 1, 1, 1]
    assert told[2].tolist() == [11, -1, 13, 14, -7, -7] and int(turn) == 3
    append_tokens(lines[:1], chosen[2:], tokens, known, reached, told, turn)
    assert told[0].tolist() == [13, -7, -7, -7, -7, -7] and int(turn) == 4, "what is told longest ago makes room"
    assert bool((told[1] == -7).all())


def test_many_rows_get_their_tokens() -> None:
    count = 2 * BLOCK + 3
    tokens, known, reached = whole(count + 1, 9), whole(count + 1, below=8), whole(count + 1, below=8)
    lines, chosen = torch.randperm(count, device=DEVICE), whole(count, seed=3)
    places, before = known.clone(), reached.clone()
    told, turn = whole(2, count), torch.zeros(1, dtype=torch.long, device=DEVICE)
    append_tokens(lines, chosen, tokens, known, reached, told, turn)
    assert torch.equal(tokens[lines, places[lines]], chosen) and torch.equal(told[0], chosen)
    assert torch.equal(known[:count], places[:count] + 1) and torch.equal(reached[:count], before[:count] + 1)
    assert (known[count], reached[count]) == (places[count], before[count])
