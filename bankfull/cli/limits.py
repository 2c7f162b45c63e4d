"""`bankfull limits`: what this machine can do at its best."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from typing import Annotated

import typer

from bankfull.cli.options import Json


def limits(
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, whatever was measured before.")] = False,
    json: Json = False,
) -> None:
    """Measure how fast this machine, or its GPU, reads memory and multiplies matrices; the figures are kept."""
    from bankfull.cli.terminal import print_table
    from bankfull.errors import ConfigError
    from bankfull.limits.ceilings import of_device
    from bankfull.runtime.device import open_device

    found = of_device(open_device(device), refresh)
    if found is None:
        raise ConfigError(f"{device} has too little free memory to be measured; end what else runs there.")
    if json:
        print(json_text.dumps(asdict(found)))
        return
    from bankfull.limits.show import ceilings_table

    print_table(ceilings_table(found))
