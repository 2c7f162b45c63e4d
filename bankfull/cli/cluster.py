"""`bankfull cluster`: the replicas of a running server."""

from __future__ import annotations

import json as json_text
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bankfull.cli.options import Json

cluster = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Watch and change the replicas of a server that this user runs on this machine (`bankfull serve --replicas`).",
)

Pid = Annotated[int | None, typer.Option(help="Process id of the server, if several run.", show_default="the only one")]
DOWN_SECONDS = 120.0
"""Time in which a server must have ended after `down`."""


@cluster.command()
def status(*, pid: Pid = None, json: Json = False) -> None:
    """List the replicas, their load and where they run."""
    _show({"do": "status"}, pid, json)


@cluster.command()
def scale(
    replicas: Annotated[str, typer.Argument(metavar="N|N..M", help="The new number, or bounds of autoscaling.")],
    *,
    pid: Pid = None,
    json: Json = False,
) -> None:
    """Change the number of replicas. Requests of a removed replica continue on the others."""
    _show({"do": "scale", "replicas": replicas}, pid, json)


@cluster.command()
def drain(
    name: Annotated[str, typer.Argument(help="A replica, as `status` lists it.")],
    *,
    pid: Pid = None,
    json: Json = False,
) -> None:
    """Move the work of one replica to the others, and end it."""
    _show({"do": "drain", "name": name}, pid, json)


@cluster.command()
def update(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Path or hub id of the new weights.", show_default="the same again, with new files"
        ),
    ] = None,
    *,
    grace: Annotated[
        float | None,
        typer.Option(
            help="Seconds that requests may run on old weights; the rest of them end with an error.",
            show_default="as long as they take",
        ),
    ] = None,
    pid: Pid = None,
    json: Json = False,
) -> int:
    """Replace the weights of all replicas, one at a time, without losing a request.

    The model must have the same vocabulary, chat template and context. New requests get the new weights as soon as one
    replica has them; a request that has begun is finished with the weights that it began with. The update goes on in
    the server if this command is stopped.
    """
    from bankfull.cluster.admin import ask
    from bankfull.errors import ConfigError

    if grace is not None and not 0 <= grace < 1e6:
        raise ConfigError(f"--grace {grace:g} is no time: give seconds, 0 or more.")
    if model is not None and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().resolve())  # the server has another working directory
    state = ask({"do": "update", "model": model, "grace": grace}, pid)
    server, shown = int(state["pid"]), 0
    while True:
        lines = state["update"]["lines"]
        if not json:
            for line in lines[shown:]:
                print(line, flush=True)
        shown = len(lines)
        if state["update"]["state"] != "running":
            break
        time.sleep(0.5)
        state = ask({"do": "status"}, server)
    if json:
        print(json_text.dumps(state["update"]))
    return 0 if state["update"]["state"] == "done" else 1


@cluster.command()
def down(*, pid: Pid = None, json: Json = False) -> int:
    """Stop the server, its replicas, and Ray if the server has started it. Running requests may finish first."""
    from bankfull.cluster.admin import alive, ask

    ended = int(ask({"do": "down"}, pid)["pid"])
    deadline = time.monotonic() + DOWN_SECONDS
    while alive(ended) and time.monotonic() < deadline:
        time.sleep(0.1)
    gone = not alive(ended)
    if json:
        print(json_text.dumps({"pid": ended, "ended": gone}))
    else:
        print(f"The server {ended} has ended." if gone else f"The server {ended} still runs: its requests take long.")
    return 0 if gone else 1


def _show(command: dict[str, Any], pid: int | None, json: bool) -> None:
    from bankfull.cluster.admin import ask

    state = ask(command, pid)
    if json:
        print(json_text.dumps(state))
        return
    where = {None: "processes of this machine", "local": "on a Ray of its own"}.get(
        state["ray"], f"on the Ray cluster at {state['ray']}"
    )
    print(f"server {state['pid']}: {state['wanted']} replicas wanted, {state['starting']} starting, {where}")
    print(f"{state['routing']} routing; {state['cpus']:g} CPUs and {state['gpus']:g} GPUs each")
    if state["update"] is not None and state["update"]["state"] == "running":
        print(f"update: {state['update']['updated']} of {state['update']['total']} replicas serve the new weights")
    for replica in state["replicas"]:
        rate = "" if replica["hit_rate"] is None else f", {100 * replica['hit_rate']:.0f}% of prompt tokens cached"
        print(
            f"  {replica['name']:12} {replica['state']:10} {replica['node']} {replica['address']}  "
            f"{replica['running']} running, {replica['waiting']} waiting, {replica['restarts']} restarts{rate}"
        )
    if state["decision"]:
        print(f"  {state['decision']}")
    for problem in {state["problem"]: None, **dict.fromkeys(state["refused"])}:
        if problem:
            print(f"  {problem}")
