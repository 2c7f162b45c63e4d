"""Maintenance of a data directory while no server runs: check it, repair it, and adopt what has no owner."""

from __future__ import annotations

import os
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bankfull.durable import fsync_folder
from bankfull.errors import ConfigError
from bankfull.serve.data.database import MIGRATIONS, SALVAGED, check_integrity, copy_of, open_read_only, side_files
from bankfull.serve.data.database import NAME as DATABASE
from bankfull.serve.data.salvage import SalvageCounts, salvage
from bankfull.serve.data.store import (
    CONTENTS,
    FILE_ID,
    INCOMING,
    POSITIONAL_OWNER,
    SET_ASIDE,
    Store,
    StoredFile,
    lock_file,
    lock_folder,
    reconcile_contents,
    set_aside,
)
from bankfull.serve.guard.keys import KEY_NAME

SHOWN = 5


class Owner(msgspec.Struct):
    name: str
    files: int = 0
    bytes: int = 0
    batches: int = 0
    by_position: bool = False
    """No key has this name any more, so no client can read what it owns."""


class DataReport(msgspec.Struct):
    folder: str
    problems: list[str]
    """Problems that `repair` fixes."""
    in_use: bool
    """Whether a running server uses the directory. Orphaned files were then not looked for, because uploads come and
    go."""
    owners: list[Owner]
    set_aside: list[str]


class Repaired(msgspec.Struct):
    folder: str
    done: list[str]


def check(folder: Path) -> DataReport:
    """Find problems without changing anything."""
    _require_data_folder(folder)
    with _try_lock(folder) as alone:
        problems, sizes, owners = _inspect(folder / DATABASE)
        problems += _check_contents(folder, sizes, alone=alone) if sizes is not None else []
        aside = sorted(path.name for path in _listed(folder / SET_ASIDE))
        return DataReport(str(folder), problems, not alone, owners, aside)


def repair(folder: Path) -> Repaired:
    """Recover every readable record and file. Nothing is deleted: whatever is replaced goes to `set-aside`."""
    _require_data_folder(folder)
    held = lock_folder(folder)
    try:
        path = folder / DATABASE
        done = []
        if (folder / SALVAGED).exists():
            _install_salvaged(folder)
            done.append("The database of an earlier repair was put in place.")
        problems, sizes, _ = _inspect(path)
        problems += _check_contents(folder, sizes, alone=True, unknown=False) if sizes is not None else []
        if problems:
            done += _rebuild_database(folder, path)
            _, sizes, _ = _inspect(path)
        unknown, back, _ = reconcile_contents(folder, sizes or {})
        if back:
            done.append(f"{_count(back, 'file')} moved back from {folder / SET_ASIDE}.")
        if unknown:
            done.append(
                f"{_count(unknown, 'orphaned file')} moved to {folder / SET_ASIDE}; `bankfull data adopt` gives "
                "them to a key."
            )
        return Repaired(str(folder), done)
    finally:
        os.close(held)


def adopt(folder: Path, what: Sequence[str], owner: str) -> list[str]:
    """Give the files and batches of owners, and files in `set-aside`, to another owner. Return one sentence for
    each."""
    _require_data_folder(folder)
    if owner and (KEY_NAME.fullmatch(owner) is None or POSITIONAL_OWNER.fullmatch(owner)):
        raise ConfigError(f"No key can have the name {owner!r}; use a name from the key file or the log.")
    store = Store(folder)
    try:
        for each in what:  # check all of them before changing anything
            _require_owner_or_file(store, each)
        return [
            _adopt_file(store, each, owner) if FILE_ID.fullmatch(each) else _adopt_owner(store, each, owner)
            for each in dict.fromkeys(what)
        ]
    finally:
        store.close()


def _require_owner_or_file(store: Store, each: str) -> None:
    if FILE_ID.fullmatch(each):
        if not (store.aside / each).is_file():
            raise ConfigError(f"There is no file {each} in {store.aside}; `bankfull data check` lists the files there.")
    elif not any(store.query(f"SELECT 1 FROM {table} WHERE owner = ? LIMIT 1", each) for table in ("files", "batches")):
        raise ConfigError(
            f"Nothing belongs to {each!r}; `bankfull data check` lists the owners and the files in {store.aside}."
        )


def _adopt_owner(store: Store, old: str, owner: str) -> str:
    with store.transaction() as database:
        counts = [
            database.execute(f"UPDATE {table} SET owner = ? WHERE owner = ?", (owner, old)).rowcount
            for table in ("files", "batches")
        ]
    return f"{counts[0]} files and {counts[1]} batches of {old} now belong to {owner or 'callers without a key'}."


def _adopt_file(store: Store, id: str, owner: str) -> str:
    source = store.aside / id
    now, place = store.now(), store.path_of(id)
    size = source.stat().st_size
    # The contents come first, as in an upload. After a crash in between, the next start moves them to set-aside again.
    os.replace(source, place)
    with place.open("rb") as contents:
        os.fsync(contents.fileno())
    fsync_folder(place.parent)
    with store.transaction() as database:
        entry = StoredFile(id, owner, "batch", f"{id}.jsonl", size, now, now + store.limits.keep_seconds)
        store.insert_file(database, entry)
    return f"{id} ({size} bytes) now belongs to {owner or 'callers without a key'}, as {entry.filename}."


def _rebuild_database(folder: Path, path: Path) -> list[str]:
    """Build a new database from the readable records; the old one goes to `set-aside`."""
    sizes = {each.name: each.stat().st_size for name in (SET_ASIDE, CONTENTS) for each in _listed(folder / name)}
    copy = copy_of(path)
    saved = salvage(path, folder / SALVAGED, sizes)
    old = _install_salvaged(folder)
    where = f" The old one is {old} in {folder / SET_ASIDE}." if old is not None else ""
    done = [f"A new database has {_summary(saved)}.{where}"]
    if not copy.exists():
        done.append(f"There was no copy {copy} of the database: what it had on damaged pages is lost.")
    elif saved.copied:
        time_of_copy = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(copy.stat().st_mtime))
        done.append(
            f"{saved.copied} of the files and batches are as the copy of {time_of_copy} UTC had them: what was entered "
            "later on damaged pages is lost."
        )
    return done


def _install_salvaged(folder: Path) -> str | None:
    """Replace the database with the salvaged one and return the new name of the old one. Until the final rename no
    server starts, and an interrupted repair continues here."""
    path = folder / DATABASE
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    old = [each for each in (path, *side_files(path)) if each.exists()]
    for each in old:
        set_aside(folder, each, f"{stamp}.{each.name}")
    fsync_folder(folder / SET_ASIDE)
    (folder / SALVAGED).rename(path)
    fsync_folder(folder)
    return f"{stamp}.{DATABASE}" if path in old else None


def _summary(saved: SalvageCounts) -> str:
    summary = f"{saved.files} files, {saved.batches} batches and {saved.lines} lines of them"
    if saved.restarted:
        summary += f"; {saved.restarted} batches lost lines and run again from their input"
    if saved.skipped_files:
        summary += (
            f"; {saved.skipped_files} file entries were left out because their contents are missing or incomplete"
        )
    return summary


def _inspect(path: Path) -> tuple[list[str], dict[str, int] | None, list[Owner]]:
    """Problems of the database, the sizes of files by id (None if the database cannot be read), and the owners."""
    if not path.exists():
        return [f"There is no database {path}."], None, []
    try:
        with closing(open_read_only(path)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                raise ConfigError(
                    f"The database {path} was written by a newer version of bankfull; start that version."
                )
            problems = [f"The database is damaged: {problem}." for problem in check_integrity(database, whole=True)]
            if problems:  # its other data cannot be trusted
                return problems, None, []
            owners: dict[str, Owner] = {}
            sizes: dict[str, int] = {}
            for id, name, size in database.execute("SELECT id, owner, bytes FROM files"):
                owner = owners.setdefault(name, Owner(name, by_position=POSITIONAL_OWNER.fullmatch(name) is not None))
                owner.files, owner.bytes, sizes[id] = owner.files + 1, owner.bytes + size, size
            for (name,) in database.execute("SELECT owner FROM batches"):
                owner = owners.setdefault(name, Owner(name, by_position=POSITIONAL_OWNER.fullmatch(name) is not None))
                owner.batches += 1
            lost = database.execute(
                "SELECT id, total, (SELECT count(*) FROM lines WHERE batch = sequence) AS there FROM batches"
                " WHERE status IN ('in_progress', 'finalizing') AND total <> there"
            ).fetchall()
            problems += [f"The batch {id} has {there} of its {total} lines." for id, total, there in lost[:SHOWN]]
            return problems, sizes, sorted(owners.values(), key=lambda owner: owner.name)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "unable to open" in str(error):
            raise ConfigError(f"The database {path} cannot be opened: {error}.") from None
        return [f"The database cannot be read: {error}."], None, []


def _check_contents(folder: Path, sizes: dict[str, int], *, alone: bool, unknown: bool = True) -> list[str]:
    there = {path.name: path.stat().st_size for path in _listed(folder / CONTENTS)}
    aside = {path.name for path in _listed(folder / SET_ASIDE)}
    missing = sorted(id for id in sizes if id not in there and (unknown or id not in aside))
    wrong = sorted(id for id, size in sizes.items() if there.get(id, size) != size)
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'file')} have no contents: {_some(missing)}.")
    if wrong:
        problems.append(f"{_count(wrong, 'file')} have contents whose size differs from their entry: {_some(wrong)}.")
    strangers = sorted(there.keys() - sizes.keys())
    if strangers and unknown and alone:
        problems.append(f"{_count(strangers, 'file')} in {CONTENTS}/ have no entry: {_some(strangers)}.")
    return problems


def _require_data_folder(folder: Path) -> None:
    if not any((folder / name).exists() for name in (DATABASE, CONTENTS, INCOMING, SET_ASIDE)):
        raise ConfigError(
            f"{folder} is not the data directory of a server; pass the one of `bankfull serve` with --data-dir or "
            "--port."
        )


@contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Lock the folder, if it can be locked, and yield whether no server uses it."""
    lock = folder / "lock"
    try:
        held = lock_file(lock) if lock.exists() else None
    except (ConfigError, OSError):
        yield False
        return
    try:
        yield True
    finally:
        if held is not None:
            os.close(held)


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names)} {what}{'' if len(names) == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def as_json(result: DataReport | Repaired) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(result)
    return document


def command_for(folder: Path, command: str) -> str:
    return f"bankfull data {command} --data-dir {shlex.quote(str(folder))}"
