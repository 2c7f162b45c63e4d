"""Acknowledged data survives a power cut before any write, and nothing is left incomplete."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bankfull.serve.api.errors import Refusal
from bankfull.serve.data.batch_store import BatchStore
from bankfull.serve.data.store import Store
from tests.serve.power.disk import Change, Disk, cuts, read_trace
from tests.serve.power.workload import FAULTS, NOW, OWNER, begin, lines_of, results

ROOT = Path(__file__).parents[3]
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
ORDER = ("validating", "in_progress", "finalizing", "cancelling", "cancelled", "completed")
QUICK_EVERY = 12


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence the log: many starts here move an unacknowledged upload to `set-aside`."""
    monkeypatch.setattr(logging.getLogger("bankfull.serve"), "disabled", True)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("recording file changes needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    source = ROOT / "tests" / "serve" / "power" / "recorder.c"
    flags = ["-shared", "-fPIC", "-Wall", "-U_FORTIFY_SOURCE"]  # its inline wrappers would bypass the recorder
    command = [COMPILER, *flags, "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def recorded(recorder: Path, place: Path, fault: str = "") -> tuple[Path, list[Change]]:
    """Run the workload; return its folder and every change to it."""
    root, trace = place / "disk", place / "trace"
    root.mkdir(parents=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(recorder),
        "POWER_ROOT": str(root),
        "POWER_TRACE": str(trace),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "tests.serve.power.workload", str(root / "data"), str(trace)]
    subprocess.run([*command, *([fault] if fault else [])], check=True, env=environment, cwd=ROOT)
    return root, read_trace(trace)


def check_start(folder: Path, acknowledged: list[Any]) -> None:
    """A server starts after the cut, finds everything that was acknowledged, and finishes open batches."""
    store = Store(folder / "data", clock=lambda: NOW)
    try:
        batch_store = BatchStore(store)
        check_files(store, acknowledged)
        check_batches(batch_store, acknowledged)
        for batch in batch_store.open_batches():
            finish(batch_store, batch.id)
        assert not batch_store.open_batches()
    finally:
        store.close()


def check_files(store: Store, acknowledged: list[Any]) -> None:
    deleted = {event["deleted"] for event in acknowledged if "deleted" in event}
    going = {event["deleting"] for event in acknowledged if "deleting" in event}
    kept = {event["file"]: event["text"] for event in acknowledged if "file" in event and event["file"] not in going}
    files = {file.id: file for file in store.files(OWNER)[0]}
    present = {path.name: path for path in (store.folder / "files").iterdir()}
    assert files.keys() == present.keys(), "entries match contents"
    for id, file in files.items():
        assert present[id].stat().st_size == file.bytes, "no contents are incomplete"
    for id, text in kept.items():
        assert id in files and present[id].read_bytes() == text.encode(), "an acknowledged upload is complete"
    aside = {path.name for path in store.aside.iterdir()}
    assert not deleted & (files.keys() | aside), "a deleted file is gone"
    assert not kept.keys() & aside
    assert not list((store.folder / "incoming").iterdir())


def check_batches(batch_store: BatchStore, acknowledged: list[Any]) -> None:
    for event in acknowledged:
        if "batch" in event:
            try:
                batch = batch_store.batch(OWNER, event["batch"])
            except Refusal:
                raise AssertionError("an acknowledged batch exists") from None
            assert ORDER.index(batch.status) >= ORDER.index(event["status"]), "no status moves backwards"
            if "results" in event:
                assert [batch.output_file, batch.error_file] == event["results"], "result files keep their ids"
                check_results(batch_store, batch.id)
    for batch in batch_store.batches(OWNER, limit=100)[0]:
        if batch.status == "in_progress":
            rows = batch_store.store.query("SELECT status FROM lines WHERE batch = ?", batch.sequence)
            statuses = [status for (status,) in rows]
            counts = len(statuses), statuses.count(200), statuses.count(400)
            assert counts == (batch.total, batch.completed, batch.failed), "counts match the lines"


def finish(batch_store: BatchStore, id: str) -> None:
    """Finish a batch as the runner does after a start."""
    batch = batch_store.batch(OWNER, id)
    if batch.status == "validating":
        begin(batch_store, batch)
        batch = batch_store.refresh(batch)
    if batch.status == "in_progress":
        batch_store.record(results(batch, range(batch.total)))
        assert not batch_store.pending(batch, -1)
        batch_store.finalize(batch, "completed")
    batch_store.conclude(batch)
    check_results(batch_store, id)


def check_results(batch_store: BatchStore, id: str) -> None:
    batch = batch_store.batch(OWNER, id)
    assert batch.status in ("completed", "cancelled")
    found: Counter[str] = Counter()
    for file in (batch.output_file, batch.error_file):
        if file is not None:
            found.update(msgspec.json.decode(line)["custom_id"] for line in batch_store.store.path_of(file).open("rb"))
    if batch.total == 0:  # cancelled before it had lines
        return
    wanted = lines_of(batch_store.store.path_of(batch.input_file).read_bytes())
    assert found == Counter(line.custom_id for line in wanted), "every line has exactly one result"


def try_cut(disk: Disk, acknowledged: list[Any], place: Path, chance: random.Random | None, kept: bool = False) -> None:
    disk.leave(place, chance, kept)
    try:
        check_start(place, acknowledged)
    finally:
        shutil.rmtree(place)


def try_cuts(root: Path, trace: list[Change], place: Path, every: int, draws: int) -> int:
    """Cut before every `every`-th change and after each acknowledgement, with none, all and random parts of the
    unsynced writes."""
    tried = 0
    for number, disk, acknowledged in cuts(trace, root):
        answered = number > 0 and trace[number - 1].kind == "A"
        if number % every and not answered:
            continue
        for draw in range(-2, draws):
            chance = random.Random(1000 * number + draw) if draw >= 0 else None
            try:
                try_cut(disk, acknowledged, place / "cut", chance, kept=draw == -1)
            except Exception as error:
                raise AssertionError(f"cut before change {number} of {len(trace)}, draw {draw}: {error}") from error
            tried += 1
    return tried


def test_the_trace_and_the_disk_agree(recorder: Path, tmp_path: Path) -> None:
    """A replay without losses equals the real folder, so the recorder missed no change."""
    root, trace = recorded(recorder, tmp_path)
    disk = Disk(root)
    for change in trace:
        disk.change(change)
    disk.leave(tmp_path / "replayed", None, kept=True)
    assert tree(tmp_path / "replayed") == tree(root)
    kinds = Counter(change.kind for change in trace)
    assert all(kinds[kind] for kind in "CWSDRUMA"), kinds


def tree(folder: Path) -> dict[str, bytes | None]:
    found = {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
    return {name: data for name, data in found.items() if not name.endswith("-shm")}


def test_what_was_acknowledged_survives_a_power_cut_at_every_twelfth_change(recorder: Path, tmp_path: Path) -> None:
    root, trace = recorded(recorder, tmp_path)
    tried = try_cuts(root, trace, tmp_path, every=QUICK_EVERY, draws=1)
    assert tried > 3 * len(trace) / QUICK_EVERY
    print(f"{len(trace)} changes, {tried} power cuts")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_a_power_cut_at_every_change(recorder: Path, tmp_path: Path) -> None:
    root, trace = recorded(recorder, tmp_path)
    tried = try_cuts(root, trace, tmp_path, every=1, draws=4)
    assert tried == 6 * (len(trace) + 1)
    print(f"{len(trace)} changes, {tried} power cuts")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_does_not_sync_fails_the_check(recorder: Path, tmp_path: Path, fault: str) -> None:
    root, trace = recorded(recorder, tmp_path, fault)
    with pytest.raises(AssertionError, match="cut before change"):
        try_cuts(root, trace, tmp_path, every=QUICK_EVERY, draws=1)
