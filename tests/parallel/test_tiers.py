"""Tiers over several ranks: each rank moves its part of a page, and a page is there only if all of its parts are."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull import LLM
from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.parallel.leading import Followers
from bankfull.runtime import naive
from bankfull.runtime.device import Cpu
from bankfull.runtime.fake import Late
from bankfull.runtime.joint_moves import JointMoves, RankMoves
from bankfull.runtime.tier_ranks import held_by_all
from bankfull.state.disk import DamagedPlace, PlaceEntry, StoredTier, stored
from bankfull.state.tiers import TransferRates
from bankfull.types import Tier
from tests.kit import Bench
from tests.parallel.split_bench import SplitBench
from tests.parallel.threads import ThreadRank, on_ranks
from tests.test_tiers import PROMPT, answer, flush, made, tiers_of
from tests.tiny import reference_of, speaking_folder

CPU = torch.device("cpu")
MESHES = ("tp=2", "pp=2")


# -- processes


def split(root: Path, mesh: str, **options: object) -> LLM:
    return made(root, parallel=mesh, rows=4, **options)


def end(llm: LLM) -> None:
    """All ranks have written what they were told; then they end, and let go of their files."""
    flush(llm)
    followers = llm.loaded.engine.runner.followers
    if isinstance(followers, Followers):
        followers.close()


def folder_of_rank(root: Path, rank: int) -> StoredTier:
    [found] = (one for one in stored(root) if one.about.get("rank") == rank)
    return found


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return answer(LLM(str(speaking_folder()), dtype="float32", memory="8MiB", page_tokens=4))[0]


@pytest.fixture(scope="module", params=MESHES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, expected: list[int]) -> Iterator:
    """A layout, and a folder with the files of its first life."""
    root = tmp_path_factory.mktemp("kv")
    first = split(root, request.param)
    assert answer(first) == (expected, 0)
    end(first)
    yield request.param, root


def test_a_prefix_survives_a_restart_of_all_ranks(written: tuple[str, Path], expected: list[int]) -> None:
    mesh, root = written
    assert {one.about["rank"] for one in stored(root)} == {0, 1}
    assert {one.about["parallel"] for one in stored(root)} == {mesh}
    again = split(root, mesh)
    assert answer(again) == (expected, 36)
    assert tiers_of(again).lower[0].traffic.read > 0
    assert answer(again, [*PROMPT, 5])[1] == 40, "the rest of the prompt was computed, and is cached too"
    end(again)


def test_a_page_that_one_rank_has_lost_is_computed_again(written: tuple[str, Path], expected: list[int]) -> None:
    mesh, root = written
    data = folder_of_rank(root, 1).path / "pages.data"
    raw = bytearray(data.read_bytes())
    raw[3] ^= 0x40  # the first page that was written is the prompt's first
    data.write_bytes(raw)
    again = split(root, mesh)
    assert answer(again) == (expected, 0)
    assert tiers_of(again).lower[0].traffic.failed == 1
    end(again)
    third = split(root, mesh)
    assert answer(third) == (expected, 36), "the page was written anew, on all ranks"
    end(third)


def test_a_rank_without_its_files_makes_those_of_the_others_worthless(
    written: tuple[str, Path], expected: list[int]
) -> None:
    mesh, root = written
    rmtree(folder_of_rank(root, 1).path)
    again = split(root, mesh)
    assert answer(again) == (expected, 0)
    assert tiers_of(again).lower[0].traffic.failed == 0, "what one rank lacks is not looked for"
    end(again)


@pytest.mark.parametrize("other", ["", "tp=2", "pp=2"])
def test_another_layout_finds_nothing(written: tuple[str, Path], other: str, expected: list[int]) -> None:
    mesh, root = written
    if other == mesh:
        pytest.skip("that is the layout of the files")
    again = split(root, other)
    assert answer(again)[0] == expected
    assert tiers_of(again).lower[0].traffic.read == 0
    end(again)


def test_a_reset_forgets_the_disks_of_all_ranks(tmp_path: Path, expected: list[int]) -> None:
    first = split(tmp_path, "tp=2")
    answer(first)
    while first.loaded.engine.busy:
        first.loaded.engine.step()
    assert folder_of_rank(tmp_path, 1).entries > 0
    first.loaded.engine.scheduler.state.forget(everywhere=True)
    assert answer(first) == (expected, 0)  # its steps come after the reset on every rank
    first.loaded.engine.scheduler.state.forget(everywhere=True)
    end(first)
    again = split(tmp_path, "tp=2")
    assert answer(again) == (expected, 0)
    end(again)


def test_a_budget_is_that_of_all_ranks(tmp_path: Path) -> None:
    llm, alone = split(tmp_path / "two", "tp=2"), made(tmp_path / "one", rows=4)
    both, one = (tiers_of(own).bytes_in(tiers_of(own).lower[0])[1] for own in (llm, alone))
    assert both == one <= 8 << 20
    part = llm.loaded.layout.frame_bytes
    assert 2 * part == alone.loaded.layout.frame_bytes
    assert both == 2 * part * tiers_of(llm).lower[0].pages.size
    end(llm)
    flush(alone)


def test_a_second_replica_has_files_of_its_own(tmp_path: Path, expected: list[int]) -> None:
    """Two replicas with the same layout share a folder; each finds its own files again."""
    first, second = split(tmp_path, "tp=2"), split(tmp_path, "tp=2")
    assert answer(first) == answer(second) == (expected, 0)
    numbers = {one.path.name.rpartition("-")[2] for one in stored(tmp_path)}
    assert len(list(stored(tmp_path))) == 4 and numbers == {"0", "1"}
    end(first)
    end(second)
    again = split(tmp_path, "tp=2")
    assert answer(again) == (expected, 36)
    end(again)


@pytest.mark.parametrize("options", [{"kv_disk": "1GiB"}, {"kv_host": "1GiB"}])
def test_tiers_of_pages_that_ranks_share_out_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"but cp=2 deals whole pages out to ranks; use tp, pp or sp=ulysses"):
        LLM(str(speaking_folder()), parallel="cp=2", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_host": "1GiB"}, "kv_host has no use here: the state is in host memory already"),
        ({"kv_disk": "100B"}, "kv_disk is too small: a page takes .* give at least"),
        ({"kv_disk": "1MiB:/proc/nothing"}, "The disk tier cannot use /proc/nothing"),
    ],
)
def test_a_tier_that_cannot_be_made_is_refused_by_all_ranks(
    options: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        split(tmp_path, "tp=2", **options)


# -- ranks as threads: every place that nobody may read is NaN


def prompts(count: int, length: int = 60) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 90) for _ in range(length)] for _ in range(count)]


def expect(bench: Bench, shape: str, asked: Sequence[list[int]], count: int) -> None:
    for name, prompt in enumerate(asked):
        right, margins = naive.generate(reference_of(shape), prompt, count, CPU)
        assert min(margins) > 1e-4, "the reference cannot tell the best token from the second"
        assert bench.tokens[name, 0] == right


def bench_of(shape: str, mesh: str, tiers: str, folder: Path, **more: object) -> SplitBench:
    made = SplitBench(
        shape,
        mesh,
        sched=SchedConfig(rows=3, step_tokens=24),
        state=StateConfig(page_tokens=4),
        tiers=tiers,
        folder=folder,
        **more,  # type: ignore[arg-type]
    )
    made.bench.engine.scheduler.pace.forecast = None  # a model as small as this is computed faster than moved
    return made


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "tp=2,pp=2", "pp=2,ffn=1", "cp=2,sp=ulysses"])
@pytest.mark.parametrize("shape", ["llama", "gemma", "hybrid"])
def test_parked_state_and_prefixes_come_back_on_every_rank(shape: str, mesh: str, tiers: str, tmp_path: Path) -> None:
    """The device holds two of the sequences."""
    asked = prompts(5)
    with bench_of(shape, mesh, tiers, tmp_path) as bench:
        for turn in range(2):
            for name, prompt in enumerate(asked):
                bench.add(name if not turn else f"again {name}", prompt, 8)
            bench.run(preempt=random.Random(3))
        expect(bench, shape, asked, 8)
        for name in range(5):
            assert bench.tokens[f"again {name}", 0] == bench.tokens[name, 0]
        tiers_made, counts = bench.manager.tiers, bench.engine.scheduler.aside.counts
        assert tiers_made is not None
        for tier in tiers_made.lower:
            assert tier.traffic.failed == 0
        assert sum(tier.traffic.read for tier in tiers_made.lower) > 0 and counts.fetched_tokens > 0
        if tiers != "disk":
            assert counts.parked > 0, "preemption has copied state to the host"
            assert tiers_made.lower[0].traffic.read > 0


@pytest.mark.parametrize("mesh", ["tp=2", "tp=2,sp=on"])
def test_tiers_of_ranks_work_beside_devices_that_are_late(mesh: str, tmp_path: Path) -> None:
    asked = prompts(5)
    with bench_of("hybrid", mesh, "both", tmp_path, device=partial(Late, 5, apart=True)) as bench:
        for name, prompt in enumerate(asked):
            bench.add(name, prompt, 8)
        bench.run(preempt=random.Random(3))
        expect(bench, "hybrid", asked, 8)
        assert bench.engine.scheduler.aside.counts.parked > 0


class FailingPlaces:
    """Loses what it is asked for, as often as `chance` says."""

    def __init__(self, whole: object, chance: random.Random) -> None:
        self.whole, self.chance, self.lost = whole, chance, 0

    def read(self, place: int, key: bytes, into: memoryview) -> None:
        if self.chance.random() < 0.3:
            self.lost += 1
            into[:] = b"\xff" * len(into)
            raise DamagedPlace("lost")
        self.whole.read(place, key, into)  # type: ignore[attr-defined]

    def write(self, place: int, key: bytes, content: memoryview) -> None:
        if self.chance.random() < 0.1:
            self.lost += 1
            raise OSError(28, "No space left on device")
        self.whole.write(place, key, content)  # type: ignore[attr-defined]

    def close(self) -> None:
        self.whole.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_of_one_rank_that_loses_pages_changes_no_token(mesh: str, rank: int, tmp_path: Path) -> None:
    asked = prompts(5)
    whole = bench_of("llama", mesh, "disk", tmp_path)
    mover = whole.runners[rank].mover
    assert mover is not None
    store = mover.stores[Tier.DISK]
    failing = FailingPlaces(store.files["pages"], random.Random(2))
    store.files = {**store.files, "pages": failing}  # type: ignore[misc]
    with whole as bench:
        tiers = bench.manager.tiers
        assert tiers is not None
        for turn in range(3):
            tiers.lower[0]._paused_until = 0.0
            for name, prompt in enumerate(asked):
                bench.add(name if not turn else (turn, name), prompt, 8)
            bench.run()
        expect(bench, "llama", asked, 8)
        for turn in (1, 2):
            assert all(bench.tokens[(turn, name), 0] == bench.tokens[name, 0] for name in range(5))
        assert failing.lost > 0 and tiers.lower[0].traffic.failed == failing.lost


def test_a_disk_of_one_rank_that_hangs_holds_up_no_step(tmp_path: Path) -> None:
    asked, go = prompts(3), threading.Event()
    whole = bench_of("llama", "tp=2", "disk", tmp_path, device=Cpu)
    mover = whole.runners[1].mover
    assert mover is not None
    store = mover.stores[Tier.DISK]
    write = store.files["pages"].write

    def hanging(place: int, key: bytes, content: memoryview) -> None:
        assert go.wait(60)
        write(place, key, content)

    store.files["pages"].write = hanging  # type: ignore[method-assign]
    with whole as bench:
        for name, prompt in enumerate(asked):
            bench.add(name, prompt, 8)
        while len(bench.finish) < 3:
            bench.step()
        expect(bench, "llama", asked, 8)
        tiers = bench.manager.tiers
        assert tiers is not None and tiers.lower[0].traffic.written == 0, "no page is there before all ranks have it"
        go.set()
        bench.run()
        assert tiers.lower[0].traffic.written > 0


# -- rank 0's account of the others


class Scripted:
    """Ranks that report what they are told to."""

    def __init__(self) -> None:
        self.waiting: list[RankMoves] = []

    def reports(self, seconds: float) -> list[RankMoves]:
        found, self.waiting = self.waiting, []
        return found


@given(
    st.integers(1, 4),
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_a_transfer_ends_once_when_all_ranks_have_ended_it(
    others: int, outcomes: list[list[bool]], order: random.Random
) -> None:
    """`outcomes`: whether each transfer succeeds, on each rank."""
    scripted = Scripted()
    joint = JointMoves(scripted, others, TransferRates())
    ends = [(transfer, rank) for transfer in range(len(outcomes)) for rank in range(1 + others)]
    order.shuffle(ends)
    for transfer in range(len(outcomes)):
        joint.begin(transfer)
    seen: Counter[int] = Counter()
    told: Counter[tuple[int, bool]] = Counter()
    for transfer, rank in ends:
        seen[transfer] += 1
        lists = ([transfer], []) if outcomes[transfer][rank] else ([], [transfer])
        if rank:
            scripted.waiting.append(RankMoves(rank, *lists, []))
        completed, failed = joint.ended(*([], []) if rank else lists)
        for ids, succeeded in ((completed, True), (failed, False)):
            for number in ids:
                told[number, succeeded] += 1
                assert seen[number] == 1 + others, "another rank still moves its part"
    right = {(number, all(outcome[: 1 + others])): 1 for number, outcome in enumerate(outcomes)}
    assert told == right


def test_the_slowest_rank_gives_the_rate() -> None:
    rates = TransferRates()
    rates.observe(Tier.DISK, Tier.DEVICE, 1000, 1.0)
    rates.hear(1, [(Tier.DISK, Tier.DEVICE, 400.0), (Tier.DEVICE, Tier.DISK, 9.0)])
    assert rates.of(Tier.DISK, Tier.DEVICE) == 400.0
    rates.hear(1, [(Tier.DISK, Tier.DEVICE, 4000.0)])
    assert rates.of(Tier.DISK, Tier.DEVICE) == 1000.0
    assert rates.of(Tier.DEVICE, Tier.DISK) == TransferRates.FIRST[Tier.DISK]


@given(st.lists(st.lists(st.sampled_from([b"", b"a", b"b"]), min_size=6, max_size=6), min_size=2, max_size=3))
def test_only_places_with_the_same_content_on_all_ranks_are_adopted(keys: list[list[bytes]]) -> None:
    def of_rank(rank: ThreadRank) -> list[int]:
        own = keys[rank.index]
        entries = [PlaceEntry(place, key, place, 0.0, 8, 0) for place, key in enumerate(own, 1) if key]
        return [entry.place for entry in held_by_all(Gathering(rank), entries, 6)]

    right = [place for place, column in enumerate(zip(*keys, strict=True), 1) if column[0] and len(set(column)) == 1]
    assert on_ranks(len(keys), of_rank) == [right] * len(keys)


class Gathering:
    """Threads as ranks that keep state."""

    facts: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, rank: ThreadRank) -> None:
        self._group, self.rank = rank, rank.index

    def gather(self, numbers: Sequence[int]) -> torch.Tensor:
        return self._group.all_gather(torch.tensor(numbers, dtype=torch.int64))
