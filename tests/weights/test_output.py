"""A folder of weights is there as a whole or not at all, whenever the power is cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.weights.writing import output
from bankfull.weights.writing.output import JOURNAL, Place, PlannedFile, output_folder

FILES = [PlannedFile("model.safetensors", b"head", (Place("a", 4, 8), Place("b", 12, 8)))]


def write(target: Path, identity: str = "recipe", names: str = "ab") -> None:
    with output_folder(target, FILES, identity) as folder:
        for name in names:
            if folder.lacks(name):
                folder.put(name, torch.arange(8, dtype=torch.uint8))
        (folder.path / "config.json").write_text("{}")
        (folder.path / "sub").mkdir()
        (folder.path / "sub" / "template.jinja").write_text("text")


def test_all_files_and_folders_are_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted(handle: int) -> None:
        fsync(handle)
        done.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))

    def renamed(old: Path, new: Path) -> None:
        replace(old, new)
        done.append("renamed")

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", renamed)
    write(tmp_path / "q")
    at = done.index("renamed")
    before, after = done[:at], done[at + 1 :]
    for name in ("model.safetensors", "config.json", "sub/template.jinja", "sub"):
        assert f".q.partial/{name}" in before, name
    assert before[-1] == ".q.partial" and after == ["."]


@pytest.mark.parametrize("build", ["", " 0.1.0+0123456789abcdef"])
def test_what_another_build_has_begun_is_refused_and_stays(tmp_path: Path, build: str) -> None:
    """Older builds wrote no name of theirs."""
    with pytest.raises(AssertionError, match="never written"):
        write(tmp_path / "q", names="a")
    journal = tmp_path / ".q.partial" / JOURNAL
    lines = journal.read_text().splitlines()
    lines[0] = lines[0].partition(" ")[0] + build
    journal.write_text("\n".join(lines) + "\n")
    left = {path.name: path.stat().st_size for path in journal.parent.iterdir()}
    with pytest.raises(ConfigError, match=r"\.q\.partial was begun by another build .* delete it to begin anew\.$"):
        write(tmp_path / "q")
    assert {path.name: path.stat().st_size for path in journal.parent.iterdir()} == left
    output.discard(tmp_path / "q")
    write(tmp_path / "q")
    assert (tmp_path / "q" / "model.safetensors").stat().st_size == 20
