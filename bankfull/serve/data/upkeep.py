"""What an operator does to a data directory while no server runs: look at it, repair it, adopt what has no owner."""

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

from bankfull.errors import ConfigError
from bankfull.serve.data.database import MIGRATIONS, SALVAGED, found_problems, side_files
from bankfull.serve.data.database import NAME as DATABASE
from bankfull.serve.data.salvage import Saved, salvage
from bankfull.serve.data.store import (
    BY_POSITION,
    CONTENTS,
    FILE_ID,
    INCOMING,
    SET_ASIDE,
    Store,
    StoredFile,
    hold_folder,
    hold_lock,
    set_aside,
    settle_contents,
    sync_folder,
)
from bankfull.serve.guard.keys import NAME_OF_KEY

SHOWN = 5


class Owner(msgspec.Struct):
    name: str
    files: int = 0
    bytes: int = 0
    batches: int = 0
    by_position: bool = False
    """No key has this name any more, and nobody can read what it owns."""


class Report(msgspec.Struct):
    folder: str
    problems: list[str]
    """What `repair` would mend."""
    in_use: bool
    """By a server: files that come and go meanwhile were not looked for."""
    owners: list[Owner]
    set_aside: list[str]


class Repaired(msgspec.Struct):
    folder: str
    done: list[str]


def check(folder: Path) -> Report:
    """Changes nothing."""
    _must_be_data(folder)
    with _held(folder) as alone:
        problems, sizes, owners = _looked_into(folder / DATABASE)
        problems += _about_contents(folder, sizes, alone=alone) if sizes is not None else []
        aside = sorted(path.name for path in _listed(folder / SET_ASIDE))
        return Report(str(folder), problems, not alone, owners, aside)


def repair(folder: Path) -> Repaired:
    """Everything readable is there afterwards, and nothing is destroyed: what is replaced is set aside."""
    _must_be_data(folder)
    held = hold_folder(folder)
    try:
        path = folder / DATABASE
        done = []
        if (folder / SALVAGED).exists():
            _put_in_place(folder)
            done.append("The database that an earlier repair had made is in its place.")
        problems, sizes, _ = _looked_into(path)
        problems += _about_contents(folder, sizes, alone=True, unknown=False) if sizes is not None else []
        if problems:
            done += _replaced(folder, path)
            _, sizes, _ = _looked_into(path)
        unknown, back, _ = settle_contents(folder, sizes or {})
        if back:
            done.append(f"{_count(back, 'file')} that had been set aside are in their place again.")
        if unknown:
            done.append(
                f"{_count(unknown, 'file')} without an entry were set aside in {folder / SET_ASIDE}; "
                "`bankfull data adopt` gives them to a key."
            )
        return Repaired(str(folder), done)
    finally:
        os.close(held)


def adopt(folder: Path, what: Sequence[str], owner: str) -> list[str]:
    """Owners whose files and batches get another one, and files that were set aside. One sentence for each."""
    _must_be_data(folder)
    if owner and (NAME_OF_KEY.fullmatch(owner) is None or BY_POSITION.fullmatch(owner)):
        raise ConfigError(f"No key can have the name {owner!r}; name one as the key file or the log has it.")
    store = Store(folder)
    try:
        for each in what:  # all of them, before anything changes
            _must_be_there(store, each)
        return [
            _adopted_file(store, each, owner) if FILE_ID.fullmatch(each) else _adopted_owner(store, each, owner)
            for each in dict.fromkeys(what)
        ]
    finally:
        store.close()


def _must_be_there(store: Store, each: str) -> None:
    if FILE_ID.fullmatch(each):
        if not (store.aside / each).is_file():
            raise ConfigError(f"No file {each} was set aside; `bankfull data check` lists those that were.")
    elif not any(store.query(f"SELECT 1 FROM {table} WHERE owner = ? LIMIT 1", each) for table in ("files", "batches")):
        raise ConfigError(
            f"Nothing belongs to {each!r}; `bankfull data check` lists the owners, and the files that were set aside."
        )


def _adopted_owner(store: Store, old: str, owner: str) -> str:
    with store.transaction() as database:
        counts = [
            database.execute(f"UPDATE {table} SET owner = ? WHERE owner = ?", (owner, old)).rowcount
            for table in ("files", "batches")
        ]
    return f"{counts[0]} files and {counts[1]} batches of {old} belong to {owner or 'everybody without a key'} now."


def _adopted_file(store: Store, id: str, owner: str) -> str:
    source = store.aside / id
    now, place = store.now(), store.place(id)
    size = source.stat().st_size
    # The contents come first, as with an upload. A crash in between sets them aside again.
    os.replace(source, place)
    with place.open("rb") as contents:
        os.fsync(contents.fileno())
    sync_folder(place.parent)
    with store.transaction() as database:
        entry = StoredFile(id, owner, "batch", f"{id}.jsonl", size, now, now + store.limits.keep_seconds)
        store.enter(database, entry)
    return f"{id} ({size} bytes) belongs to {owner or 'everybody without a key'} now, as {entry.filename}."


def _replaced(folder: Path, path: Path) -> list[str]:
    """A new database from what can be read; the old one lies beside it."""
    sizes = {each.name: each.stat().st_size for name in (SET_ASIDE, CONTENTS) for each in _listed(folder / name)}
    saved = salvage(path, folder / SALVAGED, sizes)
    old = _put_in_place(folder)
    where = f" The old one is {old} in {folder / SET_ASIDE}." if old is not None else ""
    return [f"A new database has {_told(saved)}.{where}"]


def _put_in_place(folder: Path) -> str | None:
    """The salvaged database; what the old one is called now. As long as the salvaged one has its own name no server
    starts, and a repair begins here."""
    path = folder / DATABASE
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    old = [each for each in (path, *side_files(path)) if each.exists()]
    for each in old:
        set_aside(folder, each, f"{stamp}.{each.name}")
    sync_folder(folder / SET_ASIDE)
    (folder / SALVAGED).rename(path)
    sync_folder(folder)
    return f"{stamp}.{DATABASE}" if path in old else None


def _told(saved: Saved) -> str:
    told = f"{saved.files} files, {saved.batches} batches and {saved.lines} lines of them"
    if saved.begun_again:
        told += f"; {saved.begun_again} batches had lost lines and begin again"
    if saved.without_contents:
        told += f"; {saved.without_contents} entries of files were left out, whose contents are lost or not whole"
    return told


def _looked_into(path: Path) -> tuple[list[str], dict[str, int] | None, list[Owner]]:
    """Problems of the database, the sizes of files by id (None where it cannot be read), and who owns what."""
    if not path.exists():
        return [f"There is no database {path}."], None, []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version > len(MIGRATIONS):
                raise ConfigError(f"The database {path} was written by a newer version of bankfull; use that one.")
            problems = [f"The database is damaged: {problem}." for problem in found_problems(database, whole=True)]
            if problems:  # what else it says may be anything
                return problems, None, []
            owners: dict[str, Owner] = {}
            sizes: dict[str, int] = {}
            for id, name, size in database.execute("SELECT id, owner, bytes FROM files"):
                owner = owners.setdefault(name, Owner(name, by_position=BY_POSITION.fullmatch(name) is not None))
                owner.files, owner.bytes, sizes[id] = owner.files + 1, owner.bytes + size, size
            for (name,) in database.execute("SELECT owner FROM batches"):
                owner = owners.setdefault(name, Owner(name, by_position=BY_POSITION.fullmatch(name) is not None))
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


def _about_contents(folder: Path, sizes: dict[str, int], *, alone: bool, unknown: bool = True) -> list[str]:
    there = {path.name: path.stat().st_size for path in _listed(folder / CONTENTS)}
    aside = {path.name for path in _listed(folder / SET_ASIDE)}
    missing = sorted(id for id in sizes if id not in there and (unknown or id not in aside))
    wrong = sorted(id for id, size in sizes.items() if there.get(id, size) != size)
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'file')} have no contents: {_some(missing)}.")
    if wrong:
        problems.append(f"{_count(wrong, 'file')} have contents of another size than their entry says: {_some(wrong)}.")
    strangers = sorted(there.keys() - sizes.keys())
    if strangers and unknown and alone:
        problems.append(f"{_count(strangers, 'file')} in {CONTENTS}/ have no entry: {_some(strangers)}.")
    return problems


def _must_be_data(folder: Path) -> None:
    if not any((folder / name).exists() for name in (DATABASE, CONTENTS, INCOMING, SET_ASIDE)):
        raise ConfigError(
            f"{folder} is no data directory of a server; name that of `bankfull serve` with --data-dir or --port."
        )


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether no server uses the folder, and none begins to meanwhile."""
    lock = folder / "lock"
    try:
        held = hold_lock(lock) if lock.exists() else None
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


def as_json(made: Report | Repaired) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(made)
    return found


def command_for(folder: Path, command: str) -> str:
    return f"bankfull data {command} --data-dir {shlex.quote(str(folder))}"
