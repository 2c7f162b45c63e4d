"""The command line: one file per command."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with the command's code: 2 for input that cannot be served, 130 after Ctrl-C."""
    import sys

    from bankfull.warm.client import handed_over

    code = handed_over(sys.argv[1:] if arguments is None else arguments)
    if code is None:
        from bankfull.cli.app import run_command

        code = run_command(arguments)
    raise SystemExit(code)
