"""A command that a fork of the warm process runs, seen from the process that was asked."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

HANDED_OVER = ("chat", "generate", "run")
VARIABLE = "BANKFULL_WARM"
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")


def handed_over(arguments: Sequence[str]) -> int | None:
    """The exit code of a command that ran in a fork of the warm process; None if this process should run it."""
    if not arguments or arguments[0] not in HANDED_OVER or os.environ.get(VARIABLE, "").lower() == "off":
        return None
    with suppress(OSError, ValueError):
        return ask(list(arguments))
    return None


def ask(arguments: list[str]) -> int | None:
    """Raises OSError or ValueError where nothing has begun."""
    from bankfull.errors import ConfigError
    from bankfull.warm.handover import STARTED, answered, connected

    try:
        connection = connected()
    except ConfigError:
        return None
    if connection is None:
        return None
    with connection:
        word, process = answered(connection, arguments)
        return _until_ended(connection, process) if word == STARTED else None


def _until_ended(connection: socket.socket, process: int) -> int:
    """Passes signals on to the fork, and returns its exit code."""
    from bankfull.warm.handover import answer_of

    def passed_on(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    def stopped(number: int, _: FrameType | None) -> None:
        passed_on(signal.SIGSTOP, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        passed_on(signal.SIGCONT, None)

    for name in PASSED_ON:
        _handle(name, passed_on)
    _handle("SIGTSTP", stopped)
    connection.settimeout(None)
    try:
        _, code = answer_of(connection)
    except (OSError, ValueError):
        return 1  # the warm process was killed, and the fork with it
    return code if code >= 0 else 128 - code


def _handle(name: str, handler: Callable[[int, FrameType | None], None]) -> None:
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)
