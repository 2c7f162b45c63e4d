"""The fingerprint of weights: the same for the same files anywhere, another for other weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bankfull.errors import ModelError
from bankfull.weights import file_digests
from bankfull.weights.file_digests import KEPT_BYTES
from bankfull.weights.fingerprint import weights_fingerprint
from tests.tiny import speaking_folder


def test_a_copy_has_the_same_fingerprint_and_other_weights_have_another(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(speaking_folder(), copy)
    (copy / "README.md").write_text("not a weight")
    assert weights_fingerprint(copy) == weights_fingerprint(speaking_folder())
    assert weights_fingerprint(speaking_folder(6)) != weights_fingerprint(speaking_folder())
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    assert weights_fingerprint(copy) != weights_fingerprint(speaking_folder())


def test_parts_of_a_split_file_count_and_other_files_do_not(tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    for name in (first.name, "m-00002-of-00002.gguf", "x-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    before = weights_fingerprint(first)
    (tmp_path / "x-00002-of-00002.gguf").write_bytes(b"changed")
    assert weights_fingerprint(first) == before
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"changed")
    assert weights_fingerprint(first) != before


def large(path: Path, size: int = 3 * KEPT_BYTES + 17) -> Path:
    """A file whose last change is long ago."""
    path.write_bytes(bytes(size))
    return aged(path)


def aged(path: Path) -> Path:
    """Only the time of the content can be set back: the rest of the file's state counts as old, too."""
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """All files count as old. The files that are hashed."""
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(file_digests, "TICK_SECONDS", -1e9)
    hashed: list[Path] = []
    right = file_digests._hashed

    def noted(handle: int, size: int) -> bytes:
        hashed.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        return right(handle, size)

    monkeypatch.setattr(file_digests, "_hashed", noted)
    return hashed


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("at", [1, KEPT_BYTES + 5, 2 * KEPT_BYTES - 1, 3 * KEPT_BYTES + 16])
def test_one_changed_byte_anywhere_in_a_large_file_is_another_model(tmp_path: Path, at: int) -> None:
    file = large(tmp_path / "m.gguf")
    before = weights_fingerprint(file)
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\1")
    aged(file)  # a copy that keeps the times, for example
    assert weights_fingerprint(file) != before


def test_a_large_file_is_hashed_once(tmp_path: Path, settled: list[Path]) -> None:
    file = large(tmp_path / "m.gguf")
    first = weights_fingerprint(file)
    assert weights_fingerprint(file) == first and settled == [file]
    moved = file.rename(tmp_path / "n.gguf")
    assert weights_fingerprint(moved) != first, "the name counts"
    assert settled == [file, moved]


def test_a_file_that_has_just_changed_is_hashed_again(
    tmp_path: Path, settled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within the same tick leaves the times as they are."""
    monkeypatch.setattr(file_digests, "TICK_SECONDS", 60.0)
    file = large(tmp_path / "m.gguf")
    weights_fingerprint(file)
    weights_fingerprint(file)
    assert settled == [file, file]


@pytest.mark.parametrize("left", [b"", b"[[1, ", b"[]", b'[[1], "zz"]', b"\0" * 64])
def test_a_kept_digest_that_is_half_written_is_not_believed(tmp_path: Path, settled: list[Path], left: bytes) -> None:
    file = large(tmp_path / "m.gguf")
    right = weights_fingerprint(file)
    [record] = (tmp_path / "cache" / "digests").iterdir()
    record.write_bytes(left)
    assert weights_fingerprint(file) == right and len(settled) == 2
    assert weights_fingerprint(file) == right and len(settled) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, settled: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    file = large(tmp_path / "m.gguf")
    assert weights_fingerprint(file) == weights_fingerprint(file) and len(settled) == 2
    assert "cannot be kept" in caplog.text


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, settled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = large(tmp_path / "m.gguf")
    right = file_digests._hashed

    def changing(handle: int, size: int) -> bytes:
        with file.open("ab") as opened:
            opened.write(b"more")
        return right(handle, size)

    monkeypatch.setattr(file_digests, "_hashed", changing)
    with pytest.raises(ModelError, match=r"m\.gguf has changed while it was read"):
        weights_fingerprint(file)


def test_pieces_are_in_order_whatever_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "PIECE", 1 << 10)
    file = tmp_path / "m"
    file.write_bytes(os.urandom(100_000))
    found = set()
    for threads in (1, 7):
        monkeypatch.setattr(file_digests, "MOST_THREADS", threads)
        monkeypatch.setattr(file_digests, "_cores", lambda: 8)
        with file.open("rb") as opened:
            found.add(file_digests._hashed(opened.fileno(), 100_000))
    assert len(found) == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read"):
        weights_fingerprint(tmp_path / "absent.gguf")
