"""`bankfull data`: check and repair the files and batches of a stopped server."""

from __future__ import annotations

import json as json_text
import os
from pathlib import Path
from typing import Annotated

import typer

from bankfull.cli.options import Json
from bankfull.errors import ConfigError

data = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Check, repair and adopt the files and batches of a server. Nothing is ever deleted.",
)

Folder = Annotated[
    Path | None,
    typer.Option(
        help="The data directory, as for `bankfull serve`.", show_default="the directory of a server on --port"
    ),
]
Port = Annotated[int, typer.Option(help="The port of the server that owns the data.")]


@data.command()
def check(*, data_dir: Folder = None, port: Port = 8000, json: Json = False) -> int:
    """Look for damage without changing anything. The exit code is 1 if there is any.

    While the server runs, only the database is checked, not whether every file has an entry.
    """
    from bankfull.serve.data import maintenance

    folder = _folder(data_dir, port)
    report = maintenance.check(folder)
    if json:
        print(json_text.dumps(maintenance.as_json(report)))
        return 1 if report.problems else 0
    for problem in report.problems:
        print(problem)
    if report.problems:
        print(f"`{maintenance.command_for(folder, 'repair')}` saves what can be read.")
    else:
        print(f"{folder}: no damage was found.")
    for owner in report.owners:
        lost = "; no key can read them until they are adopted" if owner.by_position else ""
        print(f"  {owner.name or '(no key)'}: {owner.files} files, {owner.bytes} bytes, {owner.batches} batches{lost}")
    if report.set_aside:
        print(f"Set aside in {folder / 'set-aside'}:")
        for name in report.set_aside:
            print(f"  {name}")
    return 1 if report.problems else 0


@data.command()
def repair(*, data_dir: Folder = None, port: Port = 8000, json: Json = False) -> None:
    """Copy everything readable into a new database. The old one, and files without an entry, are set aside."""
    from bankfull.serve.data import maintenance

    folder = _folder(data_dir, port)
    repaired = maintenance.repair(folder)
    if json:
        print(json_text.dumps(maintenance.as_json(repaired)))
        return
    for sentence in repaired.done or [f"{folder}: nothing had to be repaired."]:
        print(sentence)


@data.command()
def adopt(
    what: Annotated[list[str], typer.Argument(help="Owners or set-aside files, as listed by `check`.")],
    *,
    owner: Annotated[
        str | None, typer.Option(help="The name of the key.", show_default="the key in BANKFULL_API_KEY")
    ] = None,
    data_dir: Folder = None,
    port: Port = 8000,
    json: Json = False,
) -> None:
    """Assign data without a valid key to a key: `bankfull data adopt environment-1 --owner alice`."""
    from bankfull.serve.data import maintenance

    name = _own_name() if owner is None else owner
    told = maintenance.adopt(_folder(data_dir, port), what, name)
    print(json_text.dumps({"owner": name, "done": told}) if json else "\n".join(told))


def _folder(given: Path | None, port: int) -> Path:
    from bankfull import paths

    return given if given is not None else paths.data_dir() / "serve" / str(port)


def _own_name() -> str:
    from bankfull.serve.guard.keys import ENVIRONMENT, keys_of_environment

    keys = keys_of_environment(os.environ)
    if len(keys) != 1:
        raise ConfigError(f"Give the key that will own the data with --owner, or set {ENVIRONMENT} to that one key.")
    return keys[0].name
