"""`python -m bankfull.cli.forked SECONDS`: the warm process imports what commands need, and each fork runs one."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any

from bankfull.warm.keeper import Keeper
from bankfull.warm.place import socket_path

IMPORTED = (
    "bankfull.cli.answer",
    "bankfull.cli.app",
    "bankfull.cli.chat",
    "bankfull.cli.generate",
    "bankfull.cli.run",
    "bankfull.cli.sampling",
    "bankfull.cli.speed",
    "bankfull.cli.startup",
    "bankfull.cli.terminal",
    "bankfull.familiar",
    "bankfull.limits.meter.metered",
    "bankfull.llm",
    "bankfull.loading",
)


def main(arguments: list[str]) -> None:
    from bankfull.torch_parts import leave_out

    leave_out()
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # a fork that looks for garbage copies no page
    request = Keeper(socket_path(), float(arguments[0])).keep()
    if request is not None:  # this is a fork
        raise SystemExit(run_request(request))


def run_request(request: dict[str, Any]) -> int:
    """The exit code of a command, in a process whose files 0, 1 and 2 are the command's."""
    from bankfull.cli.app import run_command

    # As the interpreter opens them: Python asks a file what it is only once.
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=sys.stderr.encoding, errors=sys.stderr.errors, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(request["umask"])
    if request["processors"] is not None:
        os.sched_setaffinity(0, request["processors"])
    sys.argv = ["bankfull", *request["arguments"]]
    return run_command(request["arguments"])


if __name__ == "__main__":
    main(sys.argv[1:])
