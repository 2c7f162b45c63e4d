"""A model that the tape cannot record, on two ranks over gloo: they start, although their clocks differ."""

from __future__ import annotations

import sys

import pytest

from bankfull import LLM, SamplingParams
from bankfull.layers.mlp import GatedMLP
from bankfull.ops import native
from bankfull.parallel import leading
from bankfull.parallel.groups import Bounds
from tests.tiny import speaking_folder

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.runtime import uncaptured

PLAIN = GatedMLP.__call__
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FOLLOWER = """
import sys
from bankfull.layers.mlp import GatedMLP
from bankfull.parallel import rank
from bankfull.runtime import uncaptured

if {unrecorded}:
    plain = GatedMLP.__call__
    GatedMLP.__call__ = lambda self, x: plain(self, x) * 1.0
uncaptured.MOST_SECONDS = 0.0
sys.exit(rank.main())
"""
"""A rank that measures nothing for longer than one step."""


def tokens(parallel: str) -> tuple[list[int], str | None]:
    llm = LLM(str(speaking_folder()), dtype="float32", device="cpu", rows=2, parallel=parallel)
    return list(llm.generate(["The river runs"], GREEDY)[0].outputs[0].token_ids), llm.loaded.uncaptured


@pytest.mark.few(1)
@pytest.mark.parametrize(("parallel", "everywhere"), [("tp=2", True), ("pp=2", True), ("pp=2", False)])
def test_ranks_of_different_speed_start_and_give_the_tokens_of_one_process(
    parallel: str, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not everywhere, rank 0's stage alone has an expression that cannot be recorded."""
    expected, recorded = tokens("")
    assert recorded is None
    script = FOLLOWER.format(unrecorded=everywhere)
    monkeypatch.setattr(leading, "rank_command", lambda number: [sys.executable, "-c", script, str(number)])
    monkeypatch.setattr(leading, "BOUNDS", Bounds(load=60.0, collective=30.0, step=60.0))
    monkeypatch.setattr(GatedMLP, "__call__", lambda self, x: PLAIN(self, x) * 1.0)
    monkeypatch.setattr(uncaptured, "MOST_SECONDS", 3600.0)
    found, line = tokens(parallel)
    assert found == expected
    assert line is not None and "`PLAIN(self, x) * 1.0`" in line and "more time" not in line
