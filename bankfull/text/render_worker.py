"""The process in which chat templates run: `python -m bankfull.text.render_worker FD`, where FD is its end of a socket
pair.

It has no keys in its environment, no files open but the socket, little memory, and a little time for each call: the
system ends whatever takes more. It keeps nothing that anybody would miss; when the socket ends, it ends.
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
    """`begin` and `end` are called around all that a template does."""

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
        except Exception as error:  # nested too deeply for the parser or for Python's own compiler
            return BROKEN, f"cannot be compiled: {_sentence(error)}"
        return COMPILED, json.dumps(sorted(variables))

    def _render(self, name: str, values: dict[str, Any], longest: int) -> tuple[bytes, str]:
        try:
            text = self._templates[name].render(values)
        except Raised as error:
            return RAISED, _sentence(error)
        except MemoryError:
            return LIMITED, TOO_MUCH
        except Exception as error:  # a template is a program: it can fail in any way
            return FAILED, _sentence(error)
        return (MADE, text) if len(text) <= longest else (LIMITED, too_long(longest))


def _sentence(error: Exception) -> str:
    text = " ".join(str(error)[: 10 * LONGEST_SENTENCE].split())
    return text[:LONGEST_SENTENCE] or type(error).__name__


def limit_memory() -> bool:
    """To so much more than the process has now; whether the system will hold to it. Some (macOS) take the limit and
    ignore it: there the owner looks at what the process has while it waits."""
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
    # A terminal sends its interrupts to all processes; this one ends with its owner.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=int(sys.argv[1]))
    # Processor time, so that a busy machine fails no honest template. The system ends the process when it is over, in
    # the middle of whatever Python itself would not leave.
    renderer = Renderer(lambda: _set_timer(CPU_SECONDS), lambda: _set_timer(0.0))
    send(connection, STARTED, "limited" if limit_memory() else "unlimited")
    while (message := receive(connection)) is not None:
        kind, text = renderer.answer(json.loads(message[1]))
        send(connection, kind, text)
        if kind == LIMITED:
            return  # what it has taken is given back best by ending


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
    os._exit(status)  # quietly: the owner tells what became of the call
