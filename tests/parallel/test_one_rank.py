"""An engine whose model divides tokens over a group of one rank: the runner, its state and its drafts work with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bankfull import assembly
from bankfull.layers.build import Build
from bankfull.llm import LLM
from bankfull.ranks.shard import Shard
from bankfull.sample.params import SamplingParams
from tests.parallel.threads import Meeting, ThreadRank
from tests.tiny import speaking_folder

PROMPTS = ["the cat sat on", "the cat sat on a mat and then", "x"]


def tokens() -> Sequence[Sequence[int]]:
    llm = LLM(str(speaking_folder()), dtype="float32", speculative="suffix")
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0))
    return [one.outputs[0].token_ids for one in found]


@pytest.fixture(scope="module")
def expected() -> Sequence[Sequence[int]]:
    return tokens()


@pytest.mark.parametrize("sequence", ["off", "ulysses", "megatron"])
def test_an_engine_with_a_group_of_one_rank_writes_the_same_tokens(
    sequence: str, expected: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = assembly.plan_build

    def grouped(*args: Any, **more: Any) -> Build:
        rank = ThreadRank(Meeting(1), 1, 0)
        build = plain(*args, **more)
        if sequence == "megatron":
            return replace(build, shard=Shard(rank), sequence=sequence)
        return replace(build, context=rank, sequence=sequence)

    monkeypatch.setattr(assembly, "plan_build", grouped)
    assert tokens() == expected
