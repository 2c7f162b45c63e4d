"""`chat` at a real terminal: lines are remembered, and Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Terminal:
    """A program behind a pseudo-terminal, of which a test is the user."""

    def __init__(self, code: str, cache: Path) -> None:
        environment = {**os.environ, "BANKFULL_CACHE": str(cache), "TERM": "dumb", "PYTHONPATH": str(ROOT)}
        self._pid, self._end = pty.fork()
        if self._pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests that run in the background ignore it
            os.execve(sys.executable, [sys.executable, "-c", code], environment)
        self._unread = ""

    def expect(self, text: str, seconds: float = 60) -> str:
        """Read until `text` has come; everything up to its end."""
        deadline = time.monotonic() + seconds
        while text not in self._unread:
            ready, _, _ = select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not come: {self._unread!r}"
            try:
                self._unread += os.read(self._end, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the program ended before {text!r}: {self._unread!r}") from None
        end = self._unread.index(text) + len(text)
        seen, self._unread = self._unread[:end], self._unread[end:]
        return seen

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def close(self) -> int:
        """Wait for the program to end; its exit code."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                os.close(self._end)
                return os.waitstatus_to_exitcode(status)
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    os.read(self._end, 4096)
                except OSError:
                    time.sleep(0.05)
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        raise AssertionError("the program did not end")


def test_interrupts_stop_the_answer_and_lines_are_remembered(model: Path, cache: Path) -> None:
    pytest.importorskip("readline")
    arguments = ["chat", "-m", str(model), "--ignore-eos", "--no-limit"]
    # Each step takes its time, so that there is an answer to interrupt.
    code = (
        "import time, bankfull.engine as e\nstep = e.Engine.step\n"
        "def slow(self):\n    time.sleep(0.05)\n    return step(self)\n"
        f"e.Engine.step = slow\nfrom bankfull.cli import main\nmain({arguments!r})\n"
    )
    terminal = Terminal(code, cache)
    terminal.expect("> ")
    terminal.type("hello\n")
    terminal.expect("hello\r\n")
    time.sleep(1.0)
    terminal.type("\x03")
    terminal.expect(" tokens/s")
    terminal.expect("> ")
    # A signal between the prompt and the wait for keys would only count with the next key.
    terminal.type("half a line")
    terminal.expect("half a line")
    time.sleep(0.5)
    terminal.type("\x03")  # at the prompt Ctrl-C throws the line away
    terminal.expect("> ")
    terminal.type("/params max_tokens=2\n")
    terminal.expect("max_tokens=2")
    terminal.expect("> ")
    terminal.type("again\n")
    assert "cached" in terminal.expect(" cached)")  # the engine is whole after the interrupt
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.close() == 0
    history = (cache / "chat_history").read_text()
    assert "hello" in history and "again" in history and "half a line" not in history
    assert (cache / "chat_history").stat().st_mode & 0o077 == 0
