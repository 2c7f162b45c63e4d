"""Whatever was answered 200 survives a power cut, and nothing is half there: at every change that the disk sees."""

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
from bankfull.serve.data.ledger import Ledger
from bankfull.serve.data.store import Store
from tests.serve.power.disk import Change, Disk, cuts, read_trace
from tests.serve.power.workload import FAULTS, NOW, OWNER, begin, lines_of, results

ROOT = Path(__file__).parents[3]
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
ORDER = ("validating", "in_progress", "finalizing", "cancelling", "cancelled", "completed")
QUICK_EVERY = 12


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other start sets an upload aside that nobody was told of."""
    monkeypatch.setattr(logging.getLogger("bankfull.serve"), "disabled", True)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the recorder of changes needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    source = ROOT / "tests" / "serve" / "power" / "recorder.c"
    flags = ["-shared", "-fPIC", "-Wall", "-U_FORTIFY_SOURCE"]  # its inline functions are the ones replaced
    command = [COMPILER, *flags, "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def recorded(recorder: Path, place: Path, fault: str = "") -> tuple[Path, list[Change]]:
    """The folder that was worked in, and all that happened to it."""
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


def check_start(folder: Path, told: list[Any]) -> None:
    """A server starts on what is left, everything that was told of is there, and what was begun comes to its end."""
    store = Store(folder / "data", clock=lambda: NOW)
    try:
        ledger = Ledger(store)
        check_files(store, told)
        check_batches(ledger, told)
        for batch in ledger.open_batches():
            finish(ledger, batch.id)
        assert not ledger.open_batches()
    finally:
        store.close()


def check_files(store: Store, told: list[Any]) -> None:
    deleted = {what["deleted"] for what in told if "deleted" in what}
    going = {what["deleting"] for what in told if "deleting" in what}
    kept = {what["file"]: what["text"] for what in told if "file" in what and what["file"] not in going}
    files = {file.id: file for file in store.files(OWNER)[0]}
    present = {path.name: path for path in (store.folder / "files").iterdir()}
    assert files.keys() == present.keys(), "entries and contents are the same"
    for id, file in files.items():
        assert present[id].stat().st_size == file.bytes, "no contents are half there"
    for id, text in kept.items():
        assert id in files and present[id].read_bytes() == text.encode(), "an upload that was acknowledged is whole"
    aside = {path.name for path in store.aside.iterdir()}
    assert not deleted & (files.keys() | aside), "a file that was deleted is gone"
    assert not kept.keys() & aside
    assert not list((store.folder / "incoming").iterdir())


def check_batches(ledger: Ledger, told: list[Any]) -> None:
    for what in told:
        if "batch" in what:
            try:
                batch = ledger.batch(OWNER, what["batch"])
            except Refusal:
                raise AssertionError("a batch that was acknowledged exists") from None
            assert ORDER.index(batch.status) >= ORDER.index(what["status"]), "no status goes back"
            if "results" in what:
                assert [batch.output_file, batch.error_file] == what["results"], "results keep their names"
                check_results(ledger, batch.id)
    for batch in ledger.batches(OWNER, limit=100)[0]:
        if batch.status == "in_progress":
            rows = ledger.store.query("SELECT status FROM lines WHERE batch = ?", batch.sequence)
            statuses = [status for (status,) in rows]
            counts = len(statuses), statuses.count(200), statuses.count(400)
            assert counts == (batch.total, batch.completed, batch.failed), "counts are those of the lines"


def finish(ledger: Ledger, id: str) -> None:
    """As the runner does at the next start."""
    batch = ledger.batch(OWNER, id)
    if batch.status == "validating":
        begin(ledger, batch)
        batch = ledger.again(batch)
    if batch.status == "in_progress":
        ledger.record(results(batch, range(batch.total)))
        assert not ledger.pending(batch, -1)
        ledger.finalize(batch, "completed")
    ledger.conclude(batch)
    check_results(ledger, id)


def check_results(ledger: Ledger, id: str) -> None:
    batch = ledger.batch(OWNER, id)
    assert batch.status in ("completed", "cancelled")
    found: Counter[str] = Counter()
    for file in (batch.output_file, batch.error_file):
        if file is not None:
            found.update(msgspec.json.decode(line)["custom_id"] for line in ledger.store.place(file).open("rb"))
    if batch.total == 0:  # cancelled before it had lines
        return
    wanted = lines_of(ledger.store.place(batch.input_file).read_bytes())
    assert found == Counter(line.custom_id for line in wanted), "every line has exactly one result"


def try_cut(disk: Disk, told: list[Any], place: Path, chance: random.Random | None, kept: bool = False) -> None:
    disk.leave(place, chance, kept)
    try:
        check_start(place, told)
    finally:
        shutil.rmtree(place)


def try_cuts(root: Path, trace: list[Change], place: Path, every: int, draws: int) -> int:
    """Cuts before every such change, and right after each answer, with nothing, all and some of what was not synced."""
    tried = 0
    for number, disk, told in cuts(trace, root):
        answered = number > 0 and trace[number - 1].kind == "A"
        if number % every and not answered:
            continue
        for draw in range(-2, draws):
            chance = random.Random(1000 * number + draw) if draw >= 0 else None
            try:
                try_cut(disk, told, place / "cut", chance, kept=draw == -1)
            except Exception as error:
                raise AssertionError(f"cut before change {number} of {len(trace)}, draw {draw}: {error}") from error
            tried += 1
    return tried


def test_the_trace_and_the_disk_agree(recorder: Path, tmp_path: Path) -> None:
    """With nothing lost the replayed folder is what the process left: so no change escaped the recorder."""
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
def test_a_store_that_does_not_sync_is_found_out(recorder: Path, tmp_path: Path, fault: str) -> None:
    root, trace = recorded(recorder, tmp_path, fault)
    with pytest.raises(AssertionError, match="cut before change"):
        try_cuts(root, trace, tmp_path, every=QUICK_EVERY, draws=1)
