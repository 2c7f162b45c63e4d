"""`bankfull warm`: later commands begin at once."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import typer

from bankfull.cli.options import Json


def warm(
    *,
    minutes: Annotated[float, typer.Option("--for", min=0.1, max=1440, help="Minutes without use until it ends.")] = 30,
    stop: Annotated[bool, typer.Option("--stop", help="End it; commands that run go on.")] = False,
    json: Json = False,
) -> None:
    """Keep a process that has imported everything, so that run, chat and generate begin in a third of the time.

    It holds no model. Commands of the same user and installation are forks of it (BANKFULL_WARM=off: they begin by
    themselves).
    """
    from bankfull.errors import ConfigError
    from bankfull.runtime.memory import shown
    from bankfull.warm.control import begin, bytes_of, running, stopped

    if stop:
        process = stopped()
        print(json_text.dumps({"stopped": process}) if json else "Stopped." if process else "None is running.")
        return
    process = known = running()
    try:
        process = process or begin("bankfull.cli.forked", 60 * minutes)
    except OSError as error:
        raise ConfigError(f"The warm process cannot start: {error.strerror or error}.") from None
    taken = bytes_of(process)
    if json:
        print(json_text.dumps({"process": process, "bytes": taken, "begun": known is None}))
        return
    print(
        f"{'Process' if known is None else 'Already process'} {process} keeps {shown(taken)}; "
        "`bankfull warm --stop` ends it."
    )
