"""`bankfull key`: a new API key for `bankfull serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def key(
    name: Annotated[str, typer.Argument(help="Who will use it; shown in logs.")],
    *,
    requests: Annotated[int | None, typer.Option(min=1, help="Per minute.", show_default="no limit")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Per minute, prompts and answers together.", show_default="no limit")
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="May also empty the prefix cache.")] = False,
) -> None:
    """Make an API key: `bankfull key alice >> keys.txt`.

    The line for the key file goes to stdout; it holds only a hash. The key itself is shown on stderr, this one time.
    """
    from bankfull.serve.guard.keys import new_key

    secret, made = new_key(name, requests=requests, tokens=tokens, admin=admin)
    print(made.line)
    sys.stdout.flush()
    print(f"The key of {made.name}, which nobody can show you again: {secret}", file=sys.stderr)
