"""Tiers of ranks that are processes: what one life of all ranks has written, the next one finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull import LLM
from bankfull.errors import ConfigError
from bankfull.parallel.leading import Followers
from bankfull.state.disk import StoredTier, stored
from tests.test_tiers import PROMPT, answer, flush, made, tiers_of
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


def test_a_tier_that_ranks_cannot_make_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="The disk tier cannot use /proc/nothing"):
        split(tmp_path, "tp=2", kv_disk="1MiB:/proc/nothing")
