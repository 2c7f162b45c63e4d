"""A step in one call gives the tokens and leaves the rows of the step that asks Python for everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.ops import native
from bankfull.runtime.batch import build_batch
from bankfull.runtime.forward import Eager
from bankfull.runtime.rows import Rows
from bankfull.sample.logits import sample
from bankfull.sample.params import StructuredOutput
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.types import PageEdit, StepPlan, Work

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.ops.sampling.native import choose
from bankfull.runtime.taped import Taped
from tests.kit import late_devices
from tests.sample.batch import entering
from tests.test_tape import CPU, PAGE, built
from tests.tiny import speaking_folder

LONGEST, ROWS = 24, 5
PARAMS = [
    [SamplingParams(temperature=0)] * ROWS,
    [SamplingParams(top_k=k) for k in (1, 2, 5, 20, 60)],
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
        SamplingParams(min_p=0.1),
    ],
]
"""Of each row: greedy, each with a top_k, mixed."""


class Side:
    """Rows of random beginnings, every page of its own."""

    def __init__(self, family: str, arithmetic: str = "int8", all_params: Sequence[SamplingParams] = PARAMS[0]) -> None:
        self.model, kit = built(family, arithmetic)
        self.layout = layout_of(self.model.states(), PAGE)
        each = -(-LONGEST // PAGE)
        storage = Storage(self.layout, ROWS * each * len(self.layout.paged), 2 * ROWS, CPU)
        storage.frames.zero_()
        self.taped = Taped(Eager(self.model, self.layout, storage.layers), kit)
        self.rows = Rows(ROWS, LONGEST, self.layout, self.model.vocab, CPU)
        pages = iter(range(1, storage.frames.shape[0]))
        edits = [
            PageEdit(group, row, 0, tuple(next(pages) for _ in range(each)))
            for row in range(ROWS)
            for group in range(len(self.layout.paged))
        ]
        self.rows.apply(StepPlan(0, pages=edits))
        beginnings = Random(1)
        for row in range(ROWS):
            count = beginnings.randint(1, 9)
            self.rows.tokens[row, :count] = torch.tensor([beginnings.randrange(70) for _ in range(count)])
            self.rows.known[row] = count
        self.rows.sampling.chooser = choose
        for row, params in enumerate(all_params):
            self.rows.sampling.set([entering(row, params, prompt_len=1, child=row % 2, seed=2**40 + row, stop_ids=[])])

    def work(self, row: int, count: int = 1) -> Work:
        """The row's next tokens. A recurrent state moves between two slots of the row."""
        own = (1 + 2 * row, 2 + 2 * row)
        slots = () if self.layout.recurrent is None else (own[int(self.rows.slot[row]) == own[0]],)
        return Work(row, 0, count, sample=True, slots=slots)

    def run(self, work: list[Work]) -> list[int]:
        """Batch, hidden states, choice and commit, one after the other."""
        batch = build_batch(work, self.rows, self.layout)
        index = torch.from_numpy(batch.logit_index)
        lines = [w.row for w in work]
        chosen = sample(
            self.model.head(self.taped(batch)[index]),
            torch.tensor(lines),
            self.rows.sampling,
            self.rows.tokens,
            batch.positions[index] + 1,
            host_rows=lines,
        ).tokens
        for w in work:
            self.rows.computed[w.row] += w.count
            self.rows.slot[w.row] = w.slots[0] if w.slots else 0
        self.rows.commit(lines, chosen[:, None], None)
        return chosen.tolist()


@pytest.mark.parametrize("all_params", PARAMS, ids=["greedy", "top_k", "mixed"])
@pytest.mark.parametrize("arithmetic", ["int8", "exact"])
@pytest.mark.parametrize("family", ["llama", "biased", "normed", "fused", "mamba", "mamba2", "hybrid"])
def test_same_tokens_and_rows(family: str, arithmetic: str, all_params: list[SamplingParams]) -> None:
    plain, quick = Side(family, arithmetic, all_params), Side(family, arithmetic, all_params)
    choosing = quick.taped.choosing(quick.rows)
    assert choosing is not None
    for side in (plain, quick):
        side.run([side.work(row, int(side.rows.known[row])) for row in range(ROWS)])
    chance = Random(2)
    for _ in range(12):
        rows = chance.sample(range(ROWS), chance.randint(1, ROWS))
        work = [plain.work(row) for row in rows]
        assert choosing(rows, [slot for w in work for slot in w.slots]) == plain.run(work)
        for name in ("tokens", "known", "slot"):
            assert torch.equal(getattr(plain.rows, name), getattr(quick.rows, name)), name
        assert np.array_equal(plain.rows.computed, quick.rows.computed)


def test_nothing_changes_when_a_row_cannot_go_on() -> None:
    side = Side("llama")
    choosing = side.taped.choosing(side.rows)
    assert choosing is not None
    side.rows.computed[2] = side.rows.known[2]
    before = side.rows.tokens.clone(), side.rows.known.clone(), side.rows.computed.copy()
    for rows in ([0, 2], [ROWS], [-1]):
        with pytest.raises(ValueError, match="choosing step"):
            choosing(rows)
    assert torch.equal(before[0], side.rows.tokens) and torch.equal(before[1], side.rows.known)
    assert np.array_equal(before[2], side.rows.computed)


def test_a_recurrent_row_needs_a_slot_and_other_rows_have_none() -> None:
    for family, slots in (("mamba", []), ("mamba2", [1, 2, 3]), ("mamba", [1, 99]), ("llama", [1, 2])):
        side = Side(family)
        choosing = side.taped.choosing(side.rows)
        assert choosing is not None
        before = side.rows.tokens.clone(), side.rows.slot.clone()
        with pytest.raises(ValueError, match="slot"):
            choosing([0, 1], slots)
        assert torch.equal(before[0], side.rows.tokens) and torch.equal(before[1], side.rows.slot)


def test_only_on_a_whole_tape() -> None:
    """A capped head decides by its logits: those steps stay with Python."""
    model, kit = built("capped", "int8")
    layout = layout_of(model.states(), PAGE)
    taped = Taped(Eager(model, layout, Storage(layout, 8, 4, CPU).layers), kit)
    assert taped.choosing(Rows(2, 16, layout, model.vocab, CPU)) is None


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_ask_for_more_get_it(depth: int) -> None:
    """Simple requests beside others, on a device that is late too: the same answers, quick where possible."""
    all_params: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 5},
        {"logprobs": 1},
        {"structured": StructuredOutput(choice=["yes", "no"])},
        {"min_tokens": 9},
        {},
        {"prompt_logprobs": 0},
        {"temperature": 1.0, "typical_p": 0.5, "seed": 6},
        {"frequency_penalty": 0.5},
    ]
    common: dict[str, Any] = {"temperature": 0.0}
    params = [
        SamplingParams(**{**common, "max_tokens": 10 + i, "ignore_eos": "structured" not in params, **params})
        for i, params in enumerate(all_params)
    ]
    prompts = [[5 + i, 9, 7] for i in range(len(all_params))]
    with late_devices() if depth else nullcontext():
        quick, plain = (
            LLM(str(speaking_folder()), quantize="int8", rows=len(all_params), memory="4MiB", page_tokens=4)
            for _ in range(2)
        )
    plain.loaded.frontend.engine.runner._choosing = None
    runner, steps = quick.loaded.frontend.engine.runner, Counter[int]()
    choosing = runner._choosing
    assert choosing is not None

    def counted(rows: list[int]) -> list[int]:
        steps[len(rows)] += 1
        return choosing(rows)

    runner._choosing = counted
    answers = [[o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in (quick, plain)]
    assert answers[0] == answers[1]
    assert not steps, "some row of every step asked for more"
    answers = [[o.outputs[0].token_ids for o in llm.generate(prompts[:3], params[:3])] for llm in (quick, plain)]
    assert answers[0] == answers[1]
    assert steps[3] >= 5
