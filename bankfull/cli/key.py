"""`bankfull key`: a new API key for `bankfull serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def key(
    name: Annotated[str, typer.Argument(help="Name of the key's user; shown in logs.")],
    *,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Rate limit: requests per minute.", show_default="no limit")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Rate limit: tokens per minute, prompts and answers together.", show_default="no limit"
        ),
    ] = None,
    pins: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that the key may have pinned in the prefix cache (cache_control).",
            show_default="no limit of its own",
        ),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow the key to clear the prefix cache.")] = False,
) -> None:
    """Create an API key: `bankfull key alice >> keys.txt`.

    The line for the key file goes to stdout and contains only a hash. The key itself is printed to stderr, once.
    """
    from bankfull.serve.guard.keys import new_key

    secret, entry = new_key(name, requests=requests, tokens=tokens, pins=pins, admin=admin)
    print(entry.line)
    sys.stdout.flush()
    print(f"The key of {entry.name}, shown only once: {secret}", file=sys.stderr)
