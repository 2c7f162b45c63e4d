"""Input, output and progress, for terminals and pipes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from bankfull.errors import RequestError

LARGEST_INPUT = 64 << 20
SECONDS_BETWEEN_LINES = 30.0

# A model may generate escape sequences, which a terminal would execute: control characters are shown as symbols.
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def say(text: str) -> None:
    """Print a line about the run to stderr."""
    print(text, file=sys.stderr, flush=True)


def write_text(text: str) -> None:
    """Print generated text to stdout and flush."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def read_input() -> str:
    """All of stdin, without the final newline."""
    stream: IO[Any] = getattr(sys.stdin, "buffer", sys.stdin)
    data = stream.read(LARGEST_INPUT + 1)
    if len(data) > LARGEST_INPUT:
        raise RequestError(f"The prompt on stdin is longer than {LARGEST_INPUT >> 20} MiB; give a shorter one.")
    try:
        text = data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"The prompt on stdin is not UTF-8 text (byte {error.start}); convert it first.") from None
    return text.removesuffix("\n")


Advance = Callable[[int, str], None]
"""Called with the number of finished items and a note."""


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Advance]:
    """Progress on stderr: a bar on a terminal, otherwise a line every few seconds."""
    if not sys.stderr.isatty():
        last = time.monotonic()

        def line(count: int, note: str) -> None:
            nonlocal last
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                say(f"bankfull: {what}: {count}{'' if total is None else f' of {total}'}, {note}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done, note="")
        yield lambda count, note: bar.update(task, completed=count, note=note)


def print_table(table: Any) -> None:
    """Print a rich table: framed on a terminal, otherwise as plain columns."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(table)
        return
    table.box = None
    Console(file=sys.stdout, width=400, no_color=True, highlight=False).print(table, soft_wrap=False)
