"""The command line: one file per command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with the command's code: 2 for input that cannot be served, 130 after Ctrl-C."""
    from bankfull.cli.app import run_command

    raise SystemExit(run_command(arguments))
