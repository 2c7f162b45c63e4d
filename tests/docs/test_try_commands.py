"""`make test-docs` on pages made here: what runs, what fails, what is not run, and servers that end with the page."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from docs import try_commands
from docs.commands import Command
from docs.try_commands import Outcome, follow

SERVER = f"""#!{sys.executable}
import http.server, os, sys
if "--broken" in sys.argv:
    sys.exit("the reason")
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        self.wfile.write(b"batch_7")
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Ready).serve_forever()
"""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number = int(probe.getsockname()[1])
    monkeypatch.setattr(try_commands, "PORT", number)
    return number


@pytest.fixture
def programs(tmp_path: Path, port: int) -> dict[str, str]:
    """An environment in which `bankfull` is a server that answers everything."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "bankfull").write_text(SERVER)
    (folder / "bankfull").chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PORT": str(port)}


def followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], *lines: str, language: str = "sh"
) -> list[Outcome]:
    monkeypatch.setattr(Command, "place", property(lambda self: f"{self.page.name}:{self.line}"))
    page = tmp_path / "page.md"
    page.write_text("\n".join(["# A page", f"```{language}", *lines, "```", ""]))
    return follow(page, tmp_path, programs, "")


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def has_ended(stat: Path) -> bool:
    try:
        return ") Z " in stat.read_text()
    except OSError:
        return True


def test_commands_run_in_order_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]
) -> None:
    lines = ("echo one > file", "grep one file", "grep two file", "docker run x", "bankfull serv")
    found = followed(tmp_path, monkeypatch, programs, *lines)
    assert [one.result for one in found] == ["ok", "ok", "failed", "not run", "failed"]
    assert found[3].detail == "needs a Docker engine" and "No such command" in found[4].detail


def test_a_python_block_is_one_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]
) -> None:
    lines = ("value = 1", "assert value")
    assert [one.result for one in followed(tmp_path, monkeypatch, programs, *lines, language="python")] == ["ok"]


def test_a_failing_program_shows_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]
) -> None:
    (found,) = followed(tmp_path, monkeypatch, programs, "raise SystemExit('the end')", language="python")
    assert found.result == "failed" and "the end" in found.detail


def test_a_command_that_takes_too_long_ends_with_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]
) -> None:
    monkeypatch.setattr(try_commands, "COMMAND_SECONDS", 0.5)
    found = followed(tmp_path, monkeypatch, programs, "sleep 60 & echo $! > child; wait", "echo next")
    assert [one.result for one in found] == ["failed", "ok"] and "still ran after" in found[0].detail
    child = Path("/proc", (tmp_path / "page" / "child").read_text().strip(), "stat")
    for _ in range(500):
        if has_ended(child):
            return
        time.sleep(0.01)
    pytest.fail("a process of the command is still there")


@pytest.mark.skipif(not Path("/usr/bin/curl").exists(), reason="curl is not installed")
def test_a_server_runs_until_the_page_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], port: int
) -> None:
    url = f"http://127.0.0.1:{port}"
    lines = ("bankfull serve", f"curl -s {url}/", f"curl -s {url}/missing", "test ID = batch_7")
    found = followed(tmp_path, monkeypatch, programs, *lines)
    assert [one.result for one in found] == ["ok", "ok", "failed", "ok"]
    assert not answers(port), "the server has ended with the page"


def test_a_server_that_never_becomes_ready_fails_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]
) -> None:
    monkeypatch.setattr(try_commands, "fault_of", lambda command: None)
    (found,) = followed(tmp_path, monkeypatch, programs, "bankfull serve --broken")
    assert found.result == "failed" and "the reason" in found.detail


def test_a_taken_port_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str], port: int
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        (found,) = followed(tmp_path, monkeypatch, programs, "bankfull serve")
    assert found.result == "failed" and f"port {port} is taken" in found.detail


def test_options_of_a_module_that_is_not_run_must_be_in_its_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]
) -> None:
    programs |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    monkeypatch.setattr(try_commands, "NOT_RUN", ((r"docs\.try_commands|make", "a reason"),))
    monkeypatch.setattr(try_commands, "OPTIONS_OF", {"soak": ("SOAK_OPTIONS", "docs.try_commands")})
    lines = ("python -m docs.try_commands --only x", "python -m docs.try_commands --none x")
    lines += ("make soak SOAK_OPTIONS='--only x'", "make soak SOAK_OPTIONS='--none'", "make lint")
    found = followed(tmp_path, monkeypatch, programs, *lines)
    wrong, right = ("failed", "there is no option --none"), ("not run", "a reason")
    assert [(one.result, one.detail) for one in found] == [right, wrong, right, wrong, right]
