"""All models and processes in one folder of the disk tier stay within its budget, at every moment."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from bankfull.state.disk import DiskStore, identity_of
from bankfull.state.disk_budget import STEPS, DiskBudget, TierSizes
from bankfull.state.disk_files import FOLDER_BYTES, KINDS
from bankfull.state.disk_folders import DiskUnusable, counting, stored
from bankfull.state.lower_tier import LowerTier
from bankfull.types import Tier

SIZE = 2 << 20
BYTES = {"pages": 8192, "slots": 4096}
SIZES = TierSizes({"pages": 200, "slots": 60}, BYTES)


class Process:
    """What an engine does with the disk tier, without the engine."""

    def __init__(self, root: Path, model: str, size: int = SIZE) -> None:
        with counting(root):
            self.store = DiskStore(root, identity_of({"model": model}), {"model": model}, SIZES.places, BYTES)
        self.budget = DiskBudget(root, size, SIZES, {self.store.path}, self.store.reserve)
        self.store.on_close = self.budget.close
        self.budget.begin({kind: self.store.files[kind].last for kind in KINDS})
        for kind, count in self.budget.places.items():
            self.store.files[kind].cut(count)
        self.next = dict.fromkeys(KINDS, 1)

    def write(self, kind: str) -> None:
        """To the next place; behind the last one that was granted, to the first one again."""
        if self.next[kind] > self.budget.places[kind]:
            self.budget.grow()
        if self.next[kind] > self.budget.places[kind]:
            self.next[kind] = 1
        place = self.next[kind]
        self.store.files[kind].write(place, b"%d" % place, memoryview(bytes(BYTES[kind])))
        self.next[kind] += 1


def used(root: Path) -> int:
    """As `du` counts."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def test_the_sizes_of_the_last_step_are_the_budget() -> None:
    assert SIZES.at(STEPS) == dict(SIZES.places) and SIZES.at(0) == {"pages": 0, "slots": 0}
    assert SIZES.bytes_at(STEPS) <= SIZE < 1.2 * SIZES.bytes_at(STEPS)
    for places in ({"pages": 0, "slots": 0}, {"pages": 1, "slots": 60}, {"pages": 200, "slots": 1}):
        step = SIZES.step_for(places)
        assert step >= 1 and all(SIZES.at(step)[kind] >= places[kind] for kind in KINDS)


def test_a_second_model_in_the_folder_stays_within_the_budget(tmp_path: Path) -> None:
    """The first one has filled the folder, and has ended."""
    first = Process(tmp_path, "first")
    for _ in range(200):
        first.write("pages")
    first.store.close()
    assert used(tmp_path) > 0.7 * SIZE
    second = Process(tmp_path, "second")
    for _ in range(200):
        second.write("pages")
        assert used(tmp_path) <= SIZE
    assert [one.about["model"] for one in stored(tmp_path)] == ["second"], "what nobody uses gives way"
    second.store.close()


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_run_at_the_same_time_share_the_budget(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    running: dict[str, Process] = {}
    most = 0
    for _ in range(600):
        model = rng.choice("abc")
        if model not in running:
            try:
                running[model] = Process(tmp_path, model)
            except DiskUnusable as error:
                assert "other processes hold" in str(error)
                continue
        if rng.random() < 0.01:
            running.pop(model).store.close()
        else:
            for _ in range(5):
                running[model].write(rng.choice(KINDS))
        assert used(tmp_path) <= SIZE
        most = max(most, used(tmp_path))
    assert most > 0.8 * SIZE, "the budget is used"
    for process in running.values():
        process.store.close()


def test_content_of_an_earlier_life_is_kept_as_far_as_others_leave_room(tmp_path: Path) -> None:
    first = Process(tmp_path, "first")
    for _ in range(200):
        first.write("pages")
    first.store.close()
    again = Process(tmp_path, "first")
    assert len(again.store.files["pages"].entries()) == 200
    again.store.close()
    other = Process(tmp_path, "other", size=SIZE // 2)
    while other.budget.grow():
        pass
    last = Process(tmp_path, "first")
    assert 0 <= len(last.store.files["pages"].entries()) < 200 and used(tmp_path) <= SIZE
    for process in (other, last):
        process.store.close()


def test_where_others_hold_everything_the_tier_is_left_out(tmp_path: Path) -> None:
    size = SIZES.bytes_at(STEPS)
    first = Process(tmp_path, "first", size)
    while first.budget.grow():
        pass
    with pytest.raises(DiskUnusable, match=r"other processes hold 1\.8 MiB of its 1\.8 MiB"):
        Process(tmp_path, "second", size)
    first.store.close()


def test_a_disk_without_space_refuses_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(tmp_path, "one")
    monkeypatch.setattr("bankfull.state.disk_budget._free_bytes", lambda root: 100)
    assert not process.budget.grow()
    monkeypatch.undo()
    assert process.budget.grow()
    process.store.close()


def test_the_thread_answers_and_pauses_after_a_refusal(tmp_path: Path) -> None:
    process = Process(tmp_path, "one", size=SIZES.bytes_at(2) + FOLDER_BYTES // 2)
    budget, before = process.budget, process.budget.step
    budget.ask()
    while budget.asking:
        pass
    assert budget.step == before + 1
    budget.ask()
    while budget.asking:
        pass
    assert budget.step == before + 1, "the budget is spent"
    budget.ask()
    assert not budget.asking, "it asks again after a pause"
    process.store.close()


def test_each_answer_brings_places_of_every_kind_that_is_left() -> None:
    """With a place in eleven steps, copies of pages waited for as many answers."""
    sizes = TierSizes({"pages": 6, "slots": 70}, {"pages": 100, "slots": 10})
    step, seen = 1, [sizes.at(1)]
    while step < STEPS:
        step = sizes.after(step)
        seen.append(sizes.at(step))
    assert seen[-1] == {"pages": 6, "slots": 70}
    assert all(more["pages"] > less["pages"] or less["pages"] == 6 for less, more in itertools.pairwise(seen))
    assert all(more["slots"] > less["slots"] for less, more in itertools.pairwise(seen))


def test_copies_that_have_to_wait_are_due_at_a_fixed_time() -> None:
    """As the trial found it: whoever asked for the time of the next try was told a later one, and nobody tried."""
    tier = LowerTier(Tier.DISK, 4, 0, rate=10.0)
    tier.wish((0, b"a"))
    assert tier.wake_at() == 0.0
    assert not tier.may_write(1000, 5.0, 1e9)
    due = tier.wake_at()
    assert due is not None and 5.0 < due < 6.0
    assert tier.wake_at() == due, "a second question is no delay"
