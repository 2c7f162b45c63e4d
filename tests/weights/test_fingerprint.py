"""The fingerprint of weights: the same for the same files anywhere, another for other weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bankfull.errors import ModelError
from bankfull.weights import fingerprint
from bankfull.weights.fingerprint import BLOCK, weights_fingerprint
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


@pytest.mark.parametrize("size", [10 * BLOCK, 10 * BLOCK + 1, 100 * BLOCK - 1, 1000 * BLOCK + 17])
def test_of_a_large_file_blocks_at_even_distances_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", BLOCK)
    monkeypatch.setattr(fingerprint, "SAMPLED_BYTES", 8 * BLOCK)
    file = tmp_path / "m.gguf"
    file.write_bytes(bytes(size))
    before = weights_fingerprint(file)
    spacing = size // 6
    for start in (0, size // 2, size - spacing):  # a changed tensor as long as the distance is always seen
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"\1" * spacing)
        assert weights_fingerprint(file) != before
        file.write_bytes(bytes(size))
    for start in (0, size - 1):
        with file.open("r+b") as opened:
            opened.seek(start)
            opened.write(b"\1")
        assert weights_fingerprint(file) != before, "the first and the last byte are read"
        file.write_bytes(bytes(size))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read"):
        weights_fingerprint(tmp_path / "absent.gguf")
