"""The worker process that renders chat templates: `python -m bankfull.text.render_worker FD`, where FD is its end of a
socket pair.

A template is untrusted code. The worker has no secrets in its environment, no open files but the socket, and limits on
memory and on CPU time per call, which the operating system enforces. It holds no state that must survive, and ends when
the socket is closed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2.environment import Template
from jinja2.exceptions import TemplateSyntaxError

from bankfull.text.render_wire import (
    BROKEN,
    COMPILED,
    CPU_SECONDS,
    FAILED,
    LIMITED,
    MADE,
    MEMORY,
    NO_MEMORY,
    RAISED,
    STARTED,
    TOO_MUCH,
    receive,
    send,
    too_long,
)
from bankfull.text.sandbox import ChatEnvironment, Raised

LONGEST_SENTENCE = 500


class Renderer:
    """Compiles and renders templates. `begin` and `end` are called around each call."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._environment = ChatEnvironment()
        self._templates: dict[str, Template] = {}

    def answer(self, request: dict[str, Any]) -> tuple[bytes, str]:
        for name in request.get("forget", ()):
            self._templates.pop(name, None)
        self._begin()
        try:
            if "source" in request:
                return self._compile(request["name"], request["source"])
            return self._render(request["name"], request["values"], request["longest"])
        finally:
            self._end()

    def _compile(self, name: str, source: str) -> tuple[bytes, str]:
        try:
            self._templates[name], variables = self._environment.template(source)
        except TemplateSyntaxError as error:
            return BROKEN, f"is broken in line {error.lineno}: {_sentence(error)}"
        except MemoryError:
            return BROKEN, f"needs more than {MEMORY >> 20} MiB of memory to be compiled"
        except Exception as error:  # nested too deeply for the parser or for Python's compiler
            return BROKEN, f"cannot be compiled: {_sentence(error)}"
        return COMPILED, json.dumps(sorted(variables))

    def _render(self, name: str, values: dict[str, Any], longest: int) -> tuple[bytes, str]:
        try:
            text = self._templates[name].render(values)
        except Raised as error:
            return RAISED, _sentence(error)
        except MemoryError:
            return LIMITED, TOO_MUCH
        except Exception as error:  # a template is a program and can fail in any way
            return FAILED, _sentence(error)
        return (MADE, text) if len(text) <= longest else (LIMITED, too_long(longest))


def _sentence(error: Exception) -> str:
    text = " ".join(str(error)[: 10 * LONGEST_SENTENCE].split())
    return text[:LONGEST_SENTENCE] or type(error).__name__


def limit_memory() -> bool:
    """Limit the address space to its current size plus MEMORY; whether the system enforces the limit. macOS accepts the
    limit and ignores it: there, the owner checks the worker's memory while it waits."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError):
        return False
    try:
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (OSError, ValueError):
        return False
    return True


def main() -> None:
    # A terminal sends Ctrl-C to all processes; this one ends with its owner.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(sys.argv[1]))
    # CPU time, so that a busy machine does not fail a valid template. The signal ends the process even inside a C
    # function that Python would not interrupt.
    renderer = Renderer(lambda: _set_timer(CPU_SECONDS), lambda: _set_timer(0.0))
    send(connection, STARTED, "limited" if limit_memory() else "unlimited")
    while (message := receive(connection)) is not None:
        kind, text = renderer.answer(json.loads(message[1]))
        send(connection, kind, text)
        if kind == LIMITED:
            return  # ending is the simplest way to release its memory


def _set_timer(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    status = 0
    try:
        main()
    except MemoryError:
        status = NO_MEMORY
    except BaseException:
        status = 1
    os._exit(status)  # without output: the owner reports the failed call
