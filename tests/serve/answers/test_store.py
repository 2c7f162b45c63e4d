"""Kept answers: bounded in bytes, least recently used first out, and on disk private, lasting and mended."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.serve.answers.cache import open_store
from bankfull.serve.answers.store import OVERHEAD, AnswerStore, MemoryAnswers, SqliteAnswers, StoredAnswer
from tests.quick import examples


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnswerStore]:
    made = open_store("4KiB" if request.param == "memory" else f"4KiB:{tmp_path / 'answers.db'}")
    yield made
    made.close()


def put(store: AnswerStore, key: bytes, size: int = 10, streamed: bool = False) -> None:
    asyncio.run(store.put(key, StoredAnswer([b"x" * size, key], streamed)))


def get(store: AnswerStore, key: bytes) -> StoredAnswer | None:
    return asyncio.run(store.get(key))


def test_an_answer_comes_back_in_its_pieces(store: AnswerStore) -> None:
    put(store, b"a", streamed=True)
    assert get(store, b"a") == StoredAnswer([b"x" * 10, b"a"], True)
    assert get(store, b"b") is None


def test_the_answer_that_was_used_least_recently_is_evicted(store: AnswerStore) -> None:
    for key in (b"a", b"b", b"c"):
        put(store, key, 1000)
    assert store.entries == 3 and get(store, b"a") is not None
    put(store, b"d", 1000)
    assert [get(store, key) is not None for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert store.evictions == 1 and store.size <= store.limit


def test_a_new_answer_replaces_the_old_one(store: AnswerStore) -> None:
    put(store, b"a", 1000)
    put(store, b"a", 10)
    found = get(store, b"a")
    assert found is not None and len(found.parts[0]) == 10
    assert store.entries == 1 and store.size < OVERHEAD + 100


def test_an_answer_larger_than_the_store_is_left_out(store: AnswerStore) -> None:
    put(store, b"a")
    put(store, b"b", 5000)
    assert get(store, b"a") is not None and get(store, b"b") is None


@examples(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 1500)), max_size=30))
def test_both_stores_keep_the_same_answers(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[bool, int, int]]
) -> None:
    memory = MemoryAnswers(4096)
    disk = SqliteAnswers(4096, tmp_path_factory.mktemp("answers") / "answers.db")
    try:
        for writes, number, size in actions:
            key = bytes([number])
            if writes:
                put(memory, key, size), put(disk, key, size)
            else:
                assert get(memory, key) == get(disk, key)
            assert (memory.size, memory.entries, memory.evictions) == (disk.size, disk.entries, disk.evictions)
            assert memory.size <= 4096
    finally:
        disk.close()


def test_a_file_is_private_and_survives_its_server(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    first = SqliteAnswers(4096, path)
    put(first, b"a")
    first.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = SqliteAnswers(4096, path)
    assert get(second, b"a") is not None
    second.close()


def test_a_smaller_size_than_before_evicts_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    first = SqliteAnswers(1 << 20, path)
    for number in range(20):
        put(first, bytes([number]), 1000)
    first.close()
    second = SqliteAnswers(4096, path)
    assert second.size <= 4096 and second.entries == 3 and get(second, bytes([19])) is not None
    second.close()


def test_two_servers_may_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    first, second = SqliteAnswers(4096, path), SqliteAnswers(4096, path)
    for number in range(6):
        put(first, bytes([number]), 1000)
        put(second, bytes([100 + number]), 1000)
    assert get(first, bytes([105])) is not None
    put(first, b"last")
    assert first.size <= 4096
    first.close(), second.close()


def test_a_damaged_file_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    first = SqliteAnswers(1 << 20, path)
    for number in range(50):
        put(first, bytes([number]), 1000)
    first.close()
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 512):
        data[at : at + 64] = os.urandom(64)
    path.write_bytes(data)
    second = SqliteAnswers(1 << 20, path)
    put(second, b"a")
    assert get(second, b"a") is not None
    second.close()


def test_damage_while_the_server_runs_is_a_miss(tmp_path: Path) -> None:
    path = tmp_path / "answers.db"
    made = SqliteAnswers(1 << 20, path)
    put(made, b"a")
    other = sqlite3.connect(path)
    other.execute("UPDATE answers SET body = x'ffff'")
    other.commit()
    assert get(made, b"a") is None
    other.execute("DROP TABLE answers")
    other.commit()
    assert get(made, b"a") is None
    put(made, b"b")
    made.close()
    other.close()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("", "is not a size"),
        ("many", "is not a size"),
        ("0", "is not a size"),
        ("1GiB:", "no path behind the colon"),
        ("1GiB:{tmp}", "is a directory"),
        ("1GiB:{tmp}/text", "another file"),
        ("1GiB:{tmp}/other.db", "database of something else"),
        ("1GiB:{tmp}/damaged.db", "damaged database of something else"),
    ],
)
def test_bad_options_end_with_one_sentence(given: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Not a database, and long enough to be taken for one. " * 100)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE things (name TEXT)")
    damaged = bytearray((tmp_path / "other.db").read_bytes())
    damaged[100:4096] = os.urandom(3996)
    (tmp_path / "damaged.db").write_bytes(damaged)
    with pytest.raises(ConfigError, match=reason) as told:
        open_store(given.format(tmp=tmp_path))
    assert str(told.value).endswith(".") and "\n" not in str(told.value)
    assert (tmp_path / "text").read_text().startswith("Not a database")
    assert (tmp_path / "damaged.db").read_bytes() == damaged


@pytest.mark.parametrize("call", ["open", "connect"])
def test_a_file_that_cannot_be_opened_costs_the_cache_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*how: object, **more: object) -> object:
        if call == "open":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(os if call == "open" else sqlite3, call, failing)
        store = open_store(f"1GiB:{tmp_path}/answers.db")
    put(store, b"a")
    assert get(store, b"a") is None
    assert store.problem == ("Read-only file system" if call == "open" else "database or disk is full")
    assert f"{store.problem}. Until the next start there is no response cache" in caplog.text
    store.close()


def test_a_folder_that_is_not_there_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    store = open_store(f"1GiB:{tmp_path}/no/such.db")
    assert get(store, b"a") is None and store.problem == "No such file or directory"
    store.close()


def test_a_full_disk_while_the_server_runs_shows_until_it_is_over(tmp_path: Path) -> None:
    store = SqliteAnswers(1 << 20, tmp_path / "answers.db")
    database = store._database
    assert database is not None
    database.execute("PRAGMA max_page_count = 1")
    put(store, b"a", 100_000)
    assert get(store, b"b") is None and not store.problem, "it can be read"
    put(store, b"a", 100_000)
    assert store.problem == "database or disk is full"
    database.execute("PRAGMA max_page_count = 100000")
    put(store, b"a", 100_000)
    assert not store.problem and get(store, b"a") is not None
    store.close()
