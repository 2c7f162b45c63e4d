"""`bankfull limits`: what this machine can do at its best."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from typing import Annotated

import typer

from bankfull.cli.options import Json


def limits(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever was measured before.")] = False,
    json: Json = False,
) -> None:
    """Measure how fast this machine reads memory and multiplies matrices; the figures are kept for later runs."""
    from bankfull.cli.terminal import print_table
    from bankfull.limits.ceilings import measure

    found = measure(refresh)
    if json:
        print(json_text.dumps(asdict(found)))
        return
    from bankfull.limits.show import ceilings_table

    print_table(ceilings_table(found))
