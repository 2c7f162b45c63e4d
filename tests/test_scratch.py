"""Folders of servers that were killed are removed by the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bankfull.scratch import ScratchFolder, remove_abandoned

HOLD = """
import sys
from pathlib import Path
from bankfull.scratch import ScratchFolder
folder = ScratchFolder("test", Path(sys.argv[1]))
(folder.path / "file").write_text("text")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with ScratchFolder("test", tmp_path) as own:
            assert left.exists() and own.stat().st_mode & 0o077 == 0
            other.kill()
            other.wait()
            with ScratchFolder("test", tmp_path) as second:
                assert not left.exists() and own.exists() and second.exists()
            assert not second.exists()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_its_own_are_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / ".owner").touch()
    (tmp_path / "bankfull-link").symlink_to(kept)
    (tmp_path / "bankfull-other").mkdir()  # without a lock: perhaps of another program
    remove_abandoned(tmp_path)
    assert (kept / ".owner").exists() and len(list(tmp_path.iterdir())) == 3
