"""Requests that see their draft tokens: which were accepted, which were rejected and by what they were replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bankfull import LLM, SamplingParams
from bankfull.errors import RequestError
from bankfull.outputs import Delta
from bankfull.runtime.shown_drafts import rejected_path
from bankfull.weights.medusa import write_heads
from tests.decode.test_drafting import PROMPT, needs_kernels
from tests.decode.test_medusa import random_heads
from tests.tiny import speaking_folder


def tiny(speculative: str, **options: Any) -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", speculative=speculative, **options)


def deltas(llm: LLM, **params: Any) -> list[Delta]:
    asked = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "include_drafts": True, **params}
    return list(llm.stream(PROMPT, SamplingParams(**asked)))


def test_the_rejected_path_follows_the_last_accepted_line() -> None:
    assert rejected_path([7, 8, 9], [0, 1, 2], 0) == [7, 8, 9]
    assert rejected_path([7, 8, 9], [0, 1, 2], 2) == [9] and rejected_path([7, 8, 9], [0, 1, 2], 3) == []
    tree, parents = [1, 2, 3, 4, 5], [0, 0, 1, 1, 2]  # 1 and 2 are alternatives; 3 and 4 follow 1, and 5 follows 2
    assert rejected_path(tree, parents, 0) == [1, 3] and rejected_path(tree, parents, 1) == [3]
    assert rejected_path(tree, parents, 2) == [5] and rejected_path(tree, parents, 4) == []


@needs_kernels
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("how", ("suffix,adaptive=false", "ngram,adaptive=false", "draft", "medusa"))
def test_every_draft_of_a_step_is_seen(how: str, depth: int, tmp_path: Path) -> None:
    if how == "draft":
        how = f"draft:{speaking_folder(7)},depth=3,adaptive=false"
    if how == "medusa":
        config = json.loads((speaking_folder() / "config.json").read_text())
        write_heads(random_heads(1, heads=2, hidden=config["hidden_size"], vocab=config["vocab_size"]), tmp_path)
        how = f"medusa:{tmp_path},nodes=6,adaptive=false"
    llm = tiny(how, depth=depth)
    plain = tiny("off").generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    found = deltas(llm)
    assert [token for one in found for token in one.token_ids] == plain[0].outputs[0].token_ids
    totals = llm.loaded.engine.totals
    seen = [one.drafts for one in found if one.drafts is not None]
    assert len(seen) == len(found)
    assert sum(one.accepted for one in seen) == sum(totals.accepted)
    assert sum(one.verified for one in seen) == sum(totals.drafted) > 0
    for delta, drafts in zip(found, seen, strict=True):
        assert drafts.accepted == len(delta.token_ids) - 1, "and one token is sampled in each step"
        if drafts.rejected:
            assert drafts.rejected[0] != delta.token_ids[-1], "a draft is rejected because another token was sampled"
        if "medusa" not in how:  # a chain: all that was verified is accepted or rejected
            assert drafts.accepted + len(drafts.rejected) == drafts.verified
    assert any(one.rejected for one in seen)
    if "suffix" in how:
        assert any(one.accepted for one in seen)


@needs_kernels
def test_only_requests_that_ask_see_them_and_logprobs_go_along() -> None:
    llm = tiny("suffix,adaptive=false")
    assert all(one.drafts is None for one in deltas(llm, include_drafts=False))
    assert not llm.loaded.engine.runner.rows.showing
    both = deltas(llm, logprobs=1)
    assert any(one.drafts is not None and one.drafts.accepted for one in both)
    assert all(one.logprobs is not None and len(one.logprobs) == len(one.token_ids) for one in both)
    off = deltas(llm, speculative=False)
    assert all(one.drafts is not None and not one.drafts.verified for one in off)
    with pytest.raises(RequestError, match="include_drafts must be true or false"):
        SamplingParams(include_drafts=1)  # type: ignore[arg-type]
