"""Tiers of ranks that are processes: what one life of all ranks has written, the next one finds."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from bankfull import LLM, loading
from bankfull.errors import RankLost
from bankfull.parallel import leading
from bankfull.parallel.leading import Followers
from bankfull.state.disk_folders import StoredTier, stored
from bankfull.types import StepPlan
from tests.parallel.apart_device import ApartCpu
from tests.test_tiers import GREEDY, PROMPT, answer, flush, made, tiers_of
from tests.tiny import speaking_folder


def split(root: Path, mesh: str, **options: object) -> LLM:
    return made(root, parallel=mesh, rows=4, **options)


def end(llm: LLM) -> None:
    """All ranks have written what they were told; then they end, and let go of their files."""
    flush(llm)
    followers = llm.loaded.engine.runner.followers
    assert isinstance(followers, Followers)
    followers.close()


def folder_of_rank(root: Path, rank: int) -> StoredTier:
    [found] = (one for one in stored(root) if one.about.get("rank") == rank)
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return answer(LLM(str(speaking_folder()), dtype="float32", memory="8MiB", page_tokens=4))[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_prefix_survives_a_restart_of_all_ranks(mesh: str, tmp_path: Path, expected: list[int]) -> None:
    first = split(tmp_path, mesh)
    assert answer(first) == (expected, 0)
    end(first)
    assert {one.about["rank"] for one in stored(tmp_path)} == {0, 1}
    assert {one.about["parallel"] for one in stored(tmp_path)} == {mesh}
    again = split(tmp_path, mesh)
    assert answer(again) == (expected, 36)
    assert tiers_of(again).lower[0].traffic.read > 0
    assert answer(again, [*PROMPT, 5])[1] == 40, "the rest of the prompt was computed, and is cached too"
    again.loaded.engine.scheduler.state.forget(everywhere=True)
    assert answer(again) == (expected, 0)
    end(again)
    entries = {one.about["rank"]: one.entries for one in stored(tmp_path)}
    assert entries[0] == entries[1] == 11, "the reset has cleared the disks of all ranks"


@pytest.mark.full
def test_a_page_that_one_rank_has_lost_is_computed_again(tmp_path: Path, expected: list[int]) -> None:
    first = split(tmp_path, "tp=2")
    answer(first)
    end(first)
    data = folder_of_rank(tmp_path, 1).path / "pages.data"
    raw = bytearray(data.read_bytes())
    raw[3] ^= 0x40  # the first page that was written is the prompt's first
    data.write_bytes(raw)
    again = split(tmp_path, "tp=2")
    assert answer(again) == (expected, 0)
    assert tiers_of(again).lower[0].traffic.failed == 1
    end(again)


APART = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from bankfull.parallel import following, rank
from tests.parallel.apart_device import ApartCpu
following.open_device = lambda name: ApartCpu()
sys.exit(rank.main())
"""
"""The process of a rank, whose device has memory of its own."""


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("pp=2", marks=pytest.mark.full)])
def test_prefixes_and_parked_state_come_back_from_the_host_memory_of_all_ranks(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 90) for _ in range(60)] for _ in range(16)]
    usual = {"rows": 8, "max_model_len": 96, "kv_disk": None}
    alone = made(tmp_path, **usual)
    expected = [answer(alone, prompt)[0] for prompt in prompts]
    monkeypatch.setattr(loading, "open_device", lambda name: ApartCpu())
    monkeypatch.setattr(leading, "rank_command", lambda number: [sys.executable, "-P", "-c", APART, str(number)])
    llm = made(tmp_path, parallel=mesh, kv_host="8MiB", **usual)
    tier = tiers_of(llm).lower[0]
    assert [answer(llm, prompt)[0] for prompt in prompts] == expected
    assert llm.loaded.sizes.frames < 16 * 16 and tier.traffic.read == 0
    again = [answer(llm, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in again] == expected
    assert sum(cached == 56 for _, cached in again) > 8 and tier.traffic.read > 0
    scheduler, preempted = llm.loaded.engine.scheduler, []

    def preempt(plan: StepPlan) -> None:
        if len(preempted) < 3 and scheduler.running > 2:
            preempted.append(plan.step)
            scheduler._preempt(scheduler._running[-1], for_memory=True)

    llm.loaded.engine.on_settle.append(lambda plan, result: preempt(plan))
    both = llm.generate([[*prompt, 5, 6] for prompt in prompts], GREEDY)
    fresh = alone.generate([[*prompt, 5, 6] for prompt in prompts], GREEDY)
    assert [one.outputs[0].token_ids for one in both] == [one.outputs[0].token_ids for one in fresh]
    assert preempted and scheduler.parking.counts.parked > 0
    end(llm)


@pytest.mark.full
def test_a_rank_that_is_killed_while_it_writes_leaves_nothing_wrong(tmp_path: Path, expected: list[int]) -> None:
    first = split(tmp_path, "tp=2")
    followers = first.loaded.engine.runner.followers
    assert isinstance(followers, Followers)
    assert answer(first)[0] == expected
    os.kill(followers._processes[0].pid, signal.SIGKILL)
    followers._processes[0].wait()
    with pytest.raises(RankLost):
        answer(first, PROMPT[5:])
    assert first.loaded.engine.runner.mover is not None
    first.loaded.engine.runner.mover.close()
    followers.close()
    again = split(tmp_path, "tp=2")
    assert answer(again)[0] == expected
    end(again)


@pytest.mark.full
def test_a_tier_that_ranks_cannot_make_is_left_out(tmp_path: Path, expected: list[int]) -> None:
    llm = split(tmp_path, "tp=2", kv_disk="1MiB:/proc/nothing")
    assert answer(llm)[0] == expected
    followers = llm.loaded.engine.runner.followers
    assert isinstance(followers, Followers)
    followers.close()
