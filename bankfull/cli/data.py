"""`bankfull data`: the files and batches of a server that does not run."""

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
    help="Check, repair and adopt the files and batches that a server keeps. Nothing is ever destroyed.",
)

Folder = Annotated[
    Path | None, typer.Option(help="As for `bankfull serve`.", show_default="that of a server on the port")
]
Port = Annotated[int, typer.Option(help="Of the server whose data it is.")]


@data.command()
def check(*, data_dir: Folder = None, port: Port = 8000, json: Json = False) -> int:
    """Look for damage. Changes nothing; the exit code is 1 if there is any.

    Beside a running server the database is checked, and not whether files have no entry.
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
        lost = "; nobody can read them until they are adopted" if owner.by_position else ""
        print(f"  {owner.name or '(no key)'}: {owner.files} files, {owner.bytes} bytes, {owner.batches} batches{lost}")
    if report.set_aside:
        print(f"Set aside in {folder / 'set-aside'}:")
        for name in report.set_aside:
            print(f"  {name}")
    return 1 if report.problems else 0


@data.command()
def repair(*, data_dir: Folder = None, port: Port = 8000, json: Json = False) -> None:
    """Save what can be read into a new database. The old one, and files without an entry, are set aside."""
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
    what: Annotated[list[str], typer.Argument(help="Owners, or files that were set aside, as `check` lists them.")],
    *,
    owner: Annotated[
        str | None, typer.Option(help="The name of a key.", show_default="the key in BANKFULL_API_KEY")
    ] = None,
    data_dir: Folder = None,
    port: Port = 8000,
    json: Json = False,
) -> None:
    """Give what nobody can read to a key: `bankfull data adopt environment-1 --owner alice`."""
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
        raise ConfigError(f"Name the key that is to own it with --owner, or set {ENVIRONMENT} to that one key.")
    return keys[0].name
