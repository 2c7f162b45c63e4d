"""The input lines of a conversation: with editing and history on a terminal, unchanged from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bankfull.errors import ConfigError, RequestError
from bankfull.paths import cache_dir

HISTORY_LINES = 1000
LONGEST_LINE = 1 << 20


@contextmanager
def lines_of_stdin() -> Iterator[Iterator[str]]:
    if not sys.stdin.isatty():
        yield joined(_piped())
        return
    with _history():
        yield joined(_typed())


def joined(lines: Iterator[str]) -> Iterator[str]:
    """A line that ends with a backslash continues on the next line."""
    parts: list[str] = []
    for line in lines:
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        yield "\n".join([*parts, line])
        parts = []
    if parts:
        yield "\n".join(parts)


def _piped() -> Iterator[str]:
    while line := sys.stdin.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise RequestError(f"A line on stdin is longer than {LONGEST_LINE} characters; split it.")
        yield line.removesuffix("\n")


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # discards the line being typed
            print()


@contextmanager
def _history() -> Iterator[None]:
    """History of earlier conversations, if Python has readline and the cache is writable."""
    readline: Any
    try:
        import readline
    except ImportError:
        yield
        return
    file = None
    with suppress(OSError, ConfigError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        file = cache_dir() / "chat_history"
        readline.set_history_length(HISTORY_LINES)
        readline.read_history_file(file)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                readline.write_history_file(file)
                file.chmod(0o600)  # the history is private
