"""Tiers over several ranks: each rank moves its part of a page, and a page is there only if all of its parts are. Ranks
are threads; every place that nobody may read is NaN."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError, RankLost
from bankfull.parallel.groups import Bounds
from bankfull.parallel.leading import Followers
from bankfull.parallel.messages import MovedMessage, OutcomeMessage, RankConnection
from bankfull.ranks.mesh import MeshSpec
from bankfull.runtime import naive
from bankfull.runtime.device import Cpu
from bankfull.runtime.joint_moves import JointMoves, RankMoves
from bankfull.runtime.tier_ranks import held_by_all, slot_bytes
from bankfull.state import lower_tier
from bankfull.state.disk import DamagedPlace, DiskStore, PlaceEntry
from bankfull.state.disk_files import ENTRY, FOLDER_BYTES
from bankfull.state.disk_folders import StoredTier, stored
from bankfull.state.lower_tier import LowerTier
from bankfull.state.transfer_rates import TransferRates
from bankfull.types import Tier
from tests.kit import Bench
from tests.late import Late
from tests.parallel.apart_device import ApartCpu
from tests.parallel.split_bench import KeepingRank, SplitBench
from tests.parallel.threads import ThreadRank, on_ranks
from tests.tiny import reference_of

CPU = torch.device("cpu")
MESHES = ("tp=2", "pp=2")
NEW = 8
FRAMES = 60
"""Pages of the device: those of two or three sequences."""


@contextmanager
def engine(shape: str, mesh: str, host: bool = False, disk: Path | None = None, **more: Any) -> Iterator[SplitBench]:
    """With tiers as a start makes them."""
    usual = {"page_tokens": 4, "snapshot_every": 8}
    sched = SchedConfig(rows=3, step_tokens=24)
    more.setdefault("device", ApartCpu)
    made = SplitBench(shape, mesh, sched=sched, state=StateConfig(**usual), frames=FRAMES, **more)  # type: ignore[arg-type]
    made.bench.engine.scheduler.pace.forecast = None  # a model as small as this is computed faster than moved
    with made:
        kv_disk = None if disk is None else f"4MiB:{disk}"
        made.add_tiers(StateConfig(**usual, kv_host="4MiB" if host else None, kv_disk=kv_disk))  # type: ignore[arg-type]
        yield made


def tier_of(bench: Bench, which: Tier) -> LowerTier:
    assert bench.manager.tiers is not None
    [found] = (tier for tier in bench.manager.tiers.lower if tier.tier == which)
    return found


def prompts(count: int = 5, length: int = 60) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 90) for _ in range(length)] for _ in range(count)]


def ask(bench: Bench, shape: str, asked: Sequence[list[int]], preempt: random.Random | None = None) -> int:
    """Ask for all at once, compare with a plain loop, and wait for the transfers; the cached tokens."""
    turn = len(bench.prompts)
    for number, prompt in enumerate(asked, turn):
        bench.add(number, prompt, NEW)
    bench.run(preempt=preempt)
    for number, prompt in enumerate(asked, turn):
        right, margins = naive.generate(reference_of(shape), prompt, NEW, CPU)
        assert min(margins) > 1e-4, "the reference cannot tell the best token from the second"
        assert bench.tokens[number, 0] == right
    return sum(bench.cached[number] for number in range(turn, turn + len(asked)))


def folder_of_rank(root: Path, rank: int) -> StoredTier:
    [found] = (one for one in stored(root) if one.about.get("rank") == rank)
    return found


# -- what comes back


@pytest.mark.few(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize(("host", "disk"), [(True, False), (False, True), (True, True)], ids=["host", "disk", "both"])
@pytest.mark.parametrize("mesh", [*MESHES, "tp=2,pp=2", "pp=2,ffn=1", "cp=2,sp=ulysses"])
@pytest.mark.parametrize("shape", ["llama", "gemma", "hybrid"])
def test_parked_state_and_prefixes_come_back_on_every_rank(
    shape: str, mesh: str, host: bool, disk: bool, tmp_path: Path
) -> None:
    asked = prompts()
    with engine(shape, mesh, host, tmp_path if disk else None) as made:
        bench = made.bench
        ask(bench, shape, asked, random.Random(3))
        ask(bench, shape, asked, random.Random(4))
        assert bench.manager.tiers is not None
        traffic = [tier.traffic for tier in bench.manager.tiers.lower]
        assert bench.engine.scheduler.parking.counts.fetched_tokens > 0 and sum(one.read for one in traffic) > 0
        assert not any(one.failed for one in traffic)
        if host:
            assert bench.engine.scheduler.parking.counts.parked > 0, "preemption has copied state to the host"
            assert tier_of(bench, Tier.HOST).traffic.read > 0


@pytest.mark.parametrize("mesh", ["tp=2", "tp=2,sp=on"])
def test_tiers_of_ranks_work_beside_devices_that_are_late(mesh: str, tmp_path: Path) -> None:
    with engine("hybrid", mesh, True, tmp_path, device=partial(Late, 5, apart=True)) as made:
        ask(made.bench, "hybrid", prompts(), random.Random(3))
        assert made.bench.engine.scheduler.parking.counts.parked > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [*MESHES, "tp=2,pp=2"])
@pytest.mark.parametrize("shape", ["llama", "hybrid"])
def test_a_prefix_survives_a_restart_of_all_ranks(shape: str, mesh: str, tmp_path: Path) -> None:
    asked = prompts(2)
    for cached in (0, 2):
        with engine(shape, mesh, disk=tmp_path) as made:
            assert ask(made.bench, shape, asked) >= 40 * cached
            assert (tier_of(made.bench, Tier.DISK).traffic.read > 0) == (cached > 0)
    assert {one.about["rank"] for one in stored(tmp_path)} == set(range(len(made.runners)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("other", [*MESHES, "tp=2,sp=on"])
@pytest.mark.parametrize("mesh", MESHES)
def test_another_layout_finds_nothing(mesh: str, other: str, tmp_path: Path) -> None:
    asked = prompts(2)
    with engine("llama", mesh, disk=tmp_path) as made:
        ask(made.bench, "llama", asked)
    with engine("llama", other, disk=tmp_path) as made:
        assert (ask(made.bench, "llama", asked) > 0) == (mesh == other)
        assert (tier_of(made.bench, Tier.DISK).traffic.read > 0) == (mesh == other)


# -- what is lost


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_page_that_one_rank_has_lost_is_computed_again(mesh: str, rank: int, tmp_path: Path) -> None:
    asked = prompts(1)
    with engine("llama", mesh, disk=tmp_path) as made:
        ask(made.bench, "llama", asked)
    data = folder_of_rank(tmp_path, rank).path / "pages.data"
    raw = bytearray(data.read_bytes())
    raw[3] ^= 0x40  # the first page that was written is the prompt's first
    data.write_bytes(raw)
    with engine("llama", mesh, disk=tmp_path) as made:
        assert ask(made.bench, "llama", asked) == 0
        assert tier_of(made.bench, Tier.DISK).traffic.failed == 1
    with engine("llama", mesh, disk=tmp_path) as made:
        assert ask(made.bench, "llama", asked) > 0, "the page was written anew, on all ranks"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_its_files_makes_those_of_the_others_worthless(rank: int, tmp_path: Path) -> None:
    asked = prompts(1)
    with engine("llama", "tp=2", disk=tmp_path) as made:
        ask(made.bench, "llama", asked)
    rmtree(folder_of_rank(tmp_path, rank).path)
    with engine("llama", "tp=2", disk=tmp_path) as made:
        assert ask(made.bench, "llama", asked) == 0
        assert tier_of(made.bench, Tier.DISK).traffic.failed == 0, "what one rank lacks is not looked for"


class FailingPlaces:
    """Loses some of what it is asked for."""

    def __init__(self, whole: Any, seed: int) -> None:
        self.whole, self.chance, self.lost = whole, random.Random(seed), 0

    def read(self, place: int, key: bytes, into: memoryview) -> None:
        if self.chance.random() < 0.3:
            self.lost += 1
            into[:] = b"\xff" * len(into)
            raise DamagedPlace("It is lost.")
        self.whole.read(place, key, into)

    def write(self, place: int, key: bytes, content: memoryview) -> None:
        if self.chance.random() < 0.1:
            self.lost += 1
            raise OSError(28, "No space left on device")
        self.whole.write(place, key, content)

    def close(self) -> None:
        self.whole.close()


def replace_disk(made: SplitBench, rank: int, places: Callable[[Any], FailingPlaces]) -> FailingPlaces:
    """`places`: makes them from a rank's own."""
    mover = made.runners[rank].mover
    assert mover is not None
    store: Any = mover.stores[Tier.DISK]
    store.files["pages"] = found = places(store.files["pages"])
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_of_one_rank_that_loses_pages_changes_no_token(
    mesh: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lower_tier, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(lower_tier, "MOST_FAILURES", 1 << 30)
    asked = prompts()
    with engine("llama", mesh, disk=tmp_path) as made:
        failing = replace_disk(made, rank, partial(FailingPlaces, seed=2))
        for _ in range(3):
            ask(made.bench, "llama", asked)
        traffic = tier_of(made.bench, Tier.DISK).traffic
        assert failing.lost > 0 and traffic.failed == failing.lost and traffic.read > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_of_one_rank_that_hangs_holds_up_no_step(rank: int, tmp_path: Path) -> None:
    go = threading.Event()

    class Hanging(FailingPlaces):
        def write(self, place: int, key: bytes, content: memoryview) -> None:
            assert go.wait(60)
            self.whole.write(place, key, content)

    with engine("llama", "tp=2", disk=tmp_path) as made:
        replace_disk(made, rank, partial(Hanging, seed=0))
        bench, tier = made.bench, tier_of(made.bench, Tier.DISK)
        for number, prompt in enumerate(prompts(3)):
            bench.add(number, prompt, NEW)
        while len(bench.finish) < 3:
            bench.step()
        assert tier.traffic.written == 0 and not tier.pages.cached, "a page is there when all ranks have written it"
        go.set()
        bench.run()
        assert tier.traffic.written > 0


# -- sizes and folders


def test_a_budget_is_that_of_all_ranks(tmp_path: Path) -> None:
    with engine("llama", "tp=2", True, tmp_path) as made:
        parts = [runner.layout.frame_bytes for runner in made.runners]
        tiers = made.bench.manager.tiers
        assert tiers is not None
        for tier in tiers.lower:
            beside = len(parts) * (FOLDER_BYTES + tier.most[0] * ENTRY.size) if tier.tier == Tier.DISK else 0
            assert tiers.bytes_in(tier)[1] == sum(parts) * tier.most[0] <= (4 << 20) - beside
            assert sum(parts) * (tier.most[0] + 2) > (4 << 20) - beside


def test_stages_of_unequal_size_have_the_same_places(tmp_path: Path) -> None:
    """One stage has pages only, the others recurrent state only."""
    with engine("delta", "pp=3", True, tmp_path) as made:
        parts = [(runner.layout.frame_bytes, slot_bytes(runner.layout)) for runner in made.runners]
        assert [bool(page) for page, _ in parts] == [not slot for _, slot in parts] == [False, True, False]
        ask(made.bench, "delta", prompts(), random.Random(3))
        files = [runner.mover.stores[Tier.DISK].files["pages"] for runner in made.runners if runner.mover]
        assert len({len(file.entries()) for file in files}) == 1  # type: ignore[attr-defined]
    with engine("delta", "pp=3", True, tmp_path) as made:
        assert ask(made.bench, "delta", prompts(2)) > 0


def test_replicas_with_one_folder_have_files_of_their_own_and_find_them_again(tmp_path: Path) -> None:
    asked = prompts(1)
    with engine("llama", "tp=2", disk=tmp_path) as first, engine("llama", "tp=2", disk=tmp_path) as second:
        assert ask(first.bench, "llama", asked) == ask(second.bench, "llama", asked) == 0
        found = list(stored(tmp_path))
        assert Counter(one.path.name.rpartition("-")[2] for one in found) == {"0": 2, "1": 2}
    with engine("llama", "tp=2", disk=tmp_path) as first, engine("llama", "tp=2", disk=tmp_path) as second:
        assert ask(first.bench, "llama", asked) == ask(second.bench, "llama", asked) > 0


def test_ranks_delete_files_of_other_models_but_none_of_each_other(tmp_path: Path) -> None:
    with engine("llama", "tp=2", disk=tmp_path) as made:
        ask(made.bench, "llama", prompts(12))
    mine = {one.path for one in stored(tmp_path)}
    held = sum(one.nbytes for one in stored(tmp_path))
    with engine("llama", "pp=2") as made:
        made.add_tiers(StateConfig(page_tokens=4, kv_disk=f"{held - 4096}:{tmp_path}"))
        kept = {one.path for one in stored(tmp_path)}
        assert len(kept) == 2 + 1 and len(kept & mine) == 1, "as much is left as the budget allows"


@pytest.mark.parametrize(
    ("device", "options", "said"),
    [
        (Cpu, {"kv_host": "1GiB"}, "kv_host has no use here: the state is in host memory already"),
        (ApartCpu, {"kv_host": "900TiB"}, "kv_host='900TiB' does not fit: .* of memory are free; give less"),
        (ApartCpu, {"kv_disk": "100B"}, "kv_disk is too small: a page takes .* give at least"),
    ],
)
def test_a_tier_that_cannot_be_made_is_refused(device: type[Cpu], options: dict[str, Any], said: str) -> None:
    with engine("llama", "tp=2", device=device) as made, pytest.raises(ConfigError, match=said):
        made.add_tiers(StateConfig(page_tokens=4, **options))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_folder_that_one_rank_cannot_use_costs_all_of_them_the_tier(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = DiskStore.reserve

    def failing(store: DiskStore, nbytes: int) -> None:
        if store._about.get("rank") == broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        right(store, nbytes)

    monkeypatch.setattr(DiskStore, "reserve", failing)
    with engine("llama", "tp=2", disk=tmp_path) as made:
        assert made.bench.manager.tiers is None and all(runner.mover is None for runner in made.runners)
        assert ask(made.bench, "llama", prompts(1)) == 0
    assert sum("No space left on device" in record.getMessage() for record in caplog.records) == 1
    assert sum("there is no disk tier" in record.getMessage() for record in caplog.records) == 2


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
        completed, failed = ([transfer], []) if outcomes[transfer][rank] else ([], [transfer])
        if rank:
            scripted.waiting.append(RankMoves(rank, completed, failed, []))
            completed, failed = [], []
        for succeeded, ids in zip((True, False), joint.ended(completed, failed), strict=True):
            for number in ids:
                told[number, succeeded] += 1
                assert seen[number] == 1 + others, "another rank still moves its part"
    assert told == {(number, all(outcome[: 1 + others])): 1 for number, outcome in enumerate(outcomes)}


def test_the_slowest_rank_gives_the_rate() -> None:
    rates = TransferRates()
    rates.observe(Tier.DISK, Tier.DEVICE, 1000, 1.0)
    rates.hear(1, [(Tier.DISK, Tier.DEVICE, 400.0)])
    assert rates.of(Tier.DISK, Tier.DEVICE) == 400.0
    rates.hear(1, [(Tier.DISK, Tier.DEVICE, 4000.0)])
    assert rates.of(Tier.DISK, Tier.DEVICE) == 1000.0
    assert rates.of(Tier.DEVICE, Tier.DISK) == TransferRates.FIRST[Tier.DISK]


@contextmanager
def hearing(count: int) -> Iterator[tuple[Followers, list[RankConnection]]]:
    """Rank 0's end over sockets, and the ends of the others."""
    pairs = [socket.socketpair() for _ in range(count)]
    followers = Followers.__new__(Followers)
    followers.mesh, followers.bounds = MeshSpec(pp=1 + count), Bounds(collective=5.0, step=5.0)
    followers._outcomes, followers._moves = deque(), []
    followers.connections = [RankConnection(ours, f"rank {rank}") for rank, (ours, _) in enumerate(pairs, 1)]
    others = [RankConnection(theirs) for _, theirs in pairs]
    try:
        yield followers, others
    finally:
        for connection in (*followers.connections, *others):
            connection.close()


def test_reports_and_results_that_come_in_any_order_are_all_heard() -> None:
    moved = MovedMessage([3], [4], [(Tier.DISK, Tier.DEVICE, 5.0)])
    with hearing(2) as (followers, (one, other)):
        assert followers.reports(0.001) == []
        other.send(moved)
        other.send(OutcomeMessage(7, [[1]], [None], {}, []))
        other.send(moved)
        assert followers.outcome().step == 7
        one.send(MovedMessage([5], [], []))
        other.send(OutcomeMessage(8, [[2]], [None], {}, []))
        found = followers.reports(60.0)
        assert Counter((each.rank, *each.completed) for each in found) == {(2, 3): 2, (1, 5): 1}
        assert found[0].rates == [(Tier.DISK, Tier.DEVICE, 5.0)]
        assert followers.outcome().step == 8
        one.close()
        with pytest.raises(RankLost, match=r"^rank 1 has ended\.$"):
            followers.reports(60.0)


@given(st.lists(st.lists(st.sampled_from([b"", b"a", b"b"]), min_size=6, max_size=6), min_size=2, max_size=3))
def test_only_places_with_the_same_content_on_all_ranks_are_adopted(keys: list[list[bytes]]) -> None:
    def of_rank(rank: ThreadRank) -> list[int]:
        own = keys[rank.index]
        entries = [PlaceEntry(place, key, place, 0.0, 8, 0) for place, key in enumerate(own, 1) if key]
        return [entry.place for entry in held_by_all(KeepingRank(rank, "tp=2"), entries, 6)]

    right = [place for place, column in enumerate(zip(*keys, strict=True), 1) if column[0] and len(set(column)) == 1]
    assert on_ranks(len(keys), of_rank) == [right] * len(keys)
