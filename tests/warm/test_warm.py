"""Commands that are forks of the warm process: they do what they do by themselves, and nobody else gets in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bankfull.errors import ConfigError
from bankfull.warm import client, control, handover
from bankfull.warm.place import is_own, socket_path
from tests.tiny import speaking_folder

MODEL = str(speaking_folder())
RUN = ("run", "one two", "--model", MODEL, "--max-tokens", "6", "--temperature", "0", "--json", "--no-limit")


def settings(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "XDG_RUNTIME_DIR": str(folder),
        "BANKFULL_CACHE": str(folder / "cache"),
        "BANKFULL_CONFIG": str(folder / "config"),
    }


def call(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = settings(folder) | options.pop("extra", {})
    command = [sys.executable, "-m", "bankfull", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, **options)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A directory with a path that leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        yield Path(folder)


@pytest.fixture
def short() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory whose user has a warm process."""
    with short_folder() as folder:
        yield from warmed(folder)


def warmed(folder: Path) -> Iterator[Path]:
    begun = json.loads(call(folder, "warm", "--json").stdout)
    assert begun["begun"] and begun["process"]
    yield folder
    assert json.loads(call(folder, "warm", "--stop", "--json").stdout) == {"stopped": begun["process"]}
    assert json.loads(call(folder, "warm", "--stop", "--json").stdout) == {"stopped": None}
    assert not list((folder / "bankfull").glob("*.sock"))


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in settings(place).items():
        monkeypatch.setenv(name, value)
    return place


def keeper(place: Path) -> int:
    return int(json.loads(call(place, "warm", "--json").stdout)["process"])


def forks_of(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def fork_of(command: subprocess.Popen[Any], process: int) -> int:
    """The fork of the warm process that runs this command, once it waits for its input."""

    def found() -> list[int]:
        forks = []
        for fork in forks_of(process):
            with suppress(OSError):
                if os.readlink(f"/proc/{fork}/fd/0") == os.readlink(f"/proc/{command.pid}/fd/0"):
                    forks.append(fork)
        return forks

    until(lambda: bool(found()))
    [fork] = found()
    until(lambda: sleeps(fork))
    return fork


def sleeps(process: int) -> bool:
    """Whether a process waits, and computes nothing for a while."""
    seen = []
    for _ in range(2):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        seen.append((fields[0], fields[11], fields[12]))
        time.sleep(0.3)
    return seen[0] == seen[1] and seen[0][0] == "S"


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_fork_answers_as_a_process_of_its_own_does(place: Path) -> None:
    forked = call(place, *RUN)
    alone = call(place, *RUN, extra={"BANKFULL_WARM": "off"})
    assert (forked.returncode, forked.stderr) == (0, alone.stderr)
    told, wanted = json.loads(forked.stdout), json.loads(alone.stdout)
    assert told["token_ids"] == wanted["token_ids"] and told["text"] == wanted["text"]


def test_a_fork_reads_its_own_input_folder_and_environment(place: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(MODEL)
    arguments = ("run", "--model", "model", "--max-tokens", "2", "--json", "--no-limit")
    told = call(place, *arguments, cwd=tmp_path, input="one", extra={"BANKFULL_CACHE": str(tmp_path / "own")})
    assert told.returncode == 0 and len(json.loads(told.stdout)["token_ids"]) == 2
    refused = call(place, *arguments, cwd=place, input="one")
    assert refused.returncode == 2 and "model" in refused.stderr and refused.stderr.count("\n") == 1


def test_commands_are_forks_of_the_warm_process(place: Path) -> None:
    command = [sys.executable, "-m", "bankfull", "run", "--model", MODEL]
    with subprocess.Popen(command, env=settings(place), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        fork_of(waiting, keeper(place))
        assert forks_of(waiting.pid) == []
        assert len(os.listdir(f"/proc/{keeper(place)}/task")) <= len(os.sched_getaffinity(0))
        waiting.communicate(b"")
    assert waiting.returncode == 2
    until(lambda: not forks_of(keeper(place)))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -9)]
)
def test_a_fork_ends_with_its_command(place: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "bankfull", "run", "--model", MODEL]
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    if number != signal.SIGKILL:  # a shell's background ignores SIGINT, and so would the command
        options["preexec_fn"] = lambda: signal.signal(number, signal.SIG_DFL)
    with subprocess.Popen(command, env=settings(place), **options) as waiting:
        fork_of(waiting, keeper(place))
        waiting.send_signal(number)
        assert waiting.wait(60) == code
    until(lambda: not forks_of(keeper(place)))


def test_what_a_process_inherits_must_be_the_same(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/nowhere")  # no fork of ours runs: it cannot enter this folder
    for change in ({"OMP_NUM_THREADS": "17"}, {"LC_ALL": "C"}, {"PYTHONHASHSEED": "3"}):
        assert call(here, *RUN, extra=change).returncode == 0  # by itself
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setenv(name, value)
            assert client.ask(["run"]) is None


def test_only_some_commands_are_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ask", lambda arguments: 7)
    assert [client.handed_over([name]) for name in client.HANDED_OVER] == [7, 7, 7]
    assert client.handed_over(["serve"]) is None and client.handed_over([]) is None
    monkeypatch.setenv(client.VARIABLE, "OFF")
    assert client.handed_over(["run"]) is None


def test_a_directory_of_others_is_not_used(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    folder = socket_path().parent
    assert handover.connected() is None and not is_own(folder)
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    socket_path().touch()
    assert handover.connected() is None
    with pytest.raises(OSError, match="may be entered by others"):
        control.begin("nothing", 60)
    folder.chmod(0o700)
    with pytest.raises(OSError):
        handover.connected()  # nobody listens
    assert client.handed_over(["run"]) is None and control.running() is None


def test_a_long_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        socket_path()
    assert client.handed_over(["run"]) is None


QUICK = """
import sys
import bankfull.warm.keeper as keeper
{}
keeper.Keeper(keeper.Path(sys.argv[2]), float(sys.argv[1])).keep()
"""


def quick(folder: Path, seconds: float, more: str = "") -> subprocess.Popen[bytes]:
    """A warm process that has imported nothing."""
    path = folder / "bankfull" / socket_path().name
    path.parent.mkdir(mode=0o700)
    begun = subprocess.Popen([sys.executable, "-c", QUICK.format(more), str(seconds), str(path)], env=settings(folder))
    until(path.exists)
    return begun


def test_it_ends_when_nobody_has_asked_for_long(short: Path) -> None:
    with quick(short, 0.5) as process:
        assert process.wait(60) == 0
    assert not list((short / "bankfull").iterdir())


def test_it_ends_when_the_program_has_changed(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = "stamps = iter(('old', 'new'))\nkeeper.stamp_now = lambda *rooms: next(stamps)"
    with quick(short, 60, changed) as process:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        assert client.handed_over(["run"]) is None
        assert process.wait(60) == 0
    assert not list((short / "bankfull").iterdir())


@pytest.mark.parametrize("sent", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00[]", b"\x02\x00\x00\x00{}"])
def test_what_is_no_request_gets_no_command(here: Path, sent: bytes) -> None:
    connection = handover.connected()
    assert connection is not None
    with connection:
        connection.sendall(sent)
        connection.shutdown(1)
        assert connection.recv(100)[:1] in (handover.REFUSED, b"")
    assert control.running() == keeper(here)
