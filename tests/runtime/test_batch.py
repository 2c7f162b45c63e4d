"""One maker of batches, and its ways to make one agree."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import bankfull
from bankfull.runtime.batch import build_batch, placed_batch
from bankfull.runtime.rows import Job, Rows
from bankfull.sample.params import SamplingParams
from bankfull.state.spec import Paged, Recurrent, TensorSpec, layout_of
from bankfull.types import Enter, PageEdit, StepPlan, Work

CPU = torch.device("cpu")
K, V, SLOT = (TensorSpec(name, (4,), "float32") for name in ("k", "v", "s"))
LAYOUT = layout_of([(Paged((K,)),), (Paged((K, V), 8), Recurrent((SLOT,)))], 4)
MAKER = "runtime/batch.py"


def test_nothing_else_constructs_a_batch() -> None:
    root = Path(bankfull.__file__).parent
    made = set()
    for path in root.rglob("*.py"):
        source = path.read_text()
        if "layers.batch import Batch" not in source:
            continue
        calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        if any(isinstance(called, ast.Name) and called.id == "Batch" for called in calls):
            made.add(str(path.relative_to(root)))
    assert made == {MAKER}


@pytest.mark.parametrize("apart", [False, True])
def test_a_planned_step_is_the_batch_that_is_laid_out_by_hand(apart: bool) -> None:
    """On a device that shares the host's memory, and on one that does not."""
    rows = Rows(3, 32, LAYOUT, 50, CPU, (lambda array: torch.from_numpy(array.copy())) if apart else None)
    prompts = {2: tuple(range(7)), 0: tuple(range(20, 31))}
    past = {2: 0, 0: 9}
    enters = [
        Enter("r", row, tokens, past[row], len(tokens), 0, slot, Job(SamplingParams(), 0))
        for slot, (row, tokens) in enumerate(prompts.items(), 5)
    ]
    widths = [32 // group.page_tokens for group in LAYOUT.paged]
    tables = [1 + 100 * g + torch.arange(2 * width).view(2, width) for g, width in enumerate(widths)]
    edits = [
        PageEdit(g, row, 0, tuple(table[i].tolist())) for g, table in enumerate(tables) for i, row in enumerate((2, 0))
    ]
    rows.apply(StepPlan(0, enter=enters, pages=edits))
    work = [Work(2, 0, 5, slots=(11,)), Work(0, 9, 2, sample=True, slots=(12,))]
    found = build_batch(work, rows, LAYOUT)
    tokens = torch.tensor([*prompts[2][:5], *prompts[0][9:11]])
    slots = torch.tensor([5, 6]), torch.tensor([11, 12])
    expected = placed_batch(LAYOUT, [5, 2], [0, 9], tokens, tables, slots)
    for name in ("q_start", "kv_len", "kept"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    assert found.logit_index.tolist() == [6] and expected.logit_index.tolist() == [4, 6]
    for name in ("tokens", "positions", "read", "write"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for ours, theirs, page_tokens in zip(found.pages, expected.pages, found.page_tokens, strict=True):
        assert torch.equal(ours, theirs[:, : -(-11 // page_tokens)])
    assert all(torch.equal(*pair) for pair in zip(found.kv_slots, expected.kv_slots, strict=True))
    for name in ("starts", "lengths", "kepts"):
        assert getattr(found, name) is None if not apart else torch.equal(getattr(found, name), getattr(expected, name))
