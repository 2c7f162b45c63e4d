"""`bankfull cache`: files that outlive the processes that wrote them: the disk tier (`--kv-disk`), prepared weights."""

from __future__ import annotations

import json as json_text
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Json

if TYPE_CHECKING:
    from bankfull.state.disk_folders import StoredTier

cache = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="List and delete cached prefixes on disk (--kv-disk), and prepared weights.",
)
Where = Annotated[
    Path | None, typer.Option(help="The directory given to --kv-disk.", show_default="kv in the cache directory")
]


def _found(path: Path | None) -> tuple[Path, list[StoredTier]]:
    from bankfull.errors import ConfigError
    from bankfull.paths import cache_dir
    from bankfull.state.disk_folders import stored

    root = cache_dir() / "kv" if path is None else path.expanduser()
    if path is not None and not root.is_dir():
        raise ConfigError(f"{root} is not a directory; give the one that --kv-disk named.")
    return root, list(stored(root))


def _fields(one: StoredTier) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "model": one.about.get("model"),
        "dtype": one.about.get("dtype"),
        "device": one.about.get("device"),
        "parallel": one.about.get("parallel"),
        "rank": one.about.get("rank"),
        "bytes": one.nbytes,
        "entries": one.entries,
        "used": one.used,
        "in_use": one.locked,
    }


@cache.command()
def info(*, path: Where = None, json: Json = False) -> None:
    """What is stored, by model."""
    from bankfull.runtime.memory import shown

    root, caches = _found(path)
    if json:
        print(json_text.dumps({"path": str(root), "caches": [_fields(one) for one in caches]}))
        return
    if not caches:
        print(f"Nothing is stored in {root}.")
        return
    print(f"{root}: {shown(sum(one.nbytes for one in caches))}")
    for one in caches:
        age = "" if not one.used else f", last used {_ago(time.time() - one.used)}"
        now = ", in use" if one.locked else ""
        rank = "" if "rank" not in one.about else f" ({one.about.get('parallel')}, rank {one.about['rank']})"
        print(f"  {one.about.get('model') or 'unknown'}{rank}: {one.entries} entries, {shown(one.nbytes)}{age}{now}")
        print(f"    {one.path.name}")


@cache.command()
def clear(
    model: Annotated[
        str | None, typer.Argument(help="Delete only what belongs to this model, as `info` names it.")
    ] = None,
    *,
    path: Where = None,
    json: Json = False,
) -> None:
    """Delete what is stored. A cache that a process uses is left alone."""
    from bankfull.errors import ConfigError
    from bankfull.runtime.memory import shown
    from bankfull.state.disk_folders import remove

    root, caches = _found(path)
    wanted = [one for one in caches if model is None or one.about.get("model") == model]
    if model is not None and not wanted:
        known = ", ".join(sorted({str(one.about.get("model")) for one in caches})) or "none"
        raise ConfigError(f"{root} has no cache of {model[:80]!r}; it has: {known}.")
    removed = [one for one in wanted if remove(one.path)]
    kept = [one for one in wanted if one not in removed]
    if json:
        print(json_text.dumps({"removed": [_fields(one) for one in removed], "in_use": [_fields(one) for one in kept]}))
        return
    print(f"Deleted {shown(sum(one.nbytes for one in removed))} in {root}.")
    for one in kept:
        print(
            f"{one.about.get('model') or one.path.name} stays: stop the process that uses it, or see who may change it."
        )


@cache.command()
def weights(
    *,
    clear: Annotated[bool, typer.Option("--clear", help="Delete them; the next start makes them again.")] = False,
    json: Json = False,
) -> None:
    """The prepared weights of each model, which later starts map (docs/kernels.md)."""
    from bankfull.runtime.memory import shown
    from bankfull.weights.store import all_prepared, prepared_dir

    found = all_prepared()
    if clear:
        for one in found:
            one.remove()
    if json:
        rows = [{"model": one.model, "bytes": one.nbytes, "used": one.used, "path": str(one.index)} for one in found]
        print(json_text.dumps({"path": str(prepared_dir()), "removed" if clear else "weights": rows}))
        return
    print(f"{'Deleted ' if clear else ''}{shown(sum(one.nbytes for one in found))} in {prepared_dir()}.")
    for one in [] if clear else found:
        print(f"  {one.model}: {shown(one.nbytes)}, last used {_ago(time.time() - one.used)}")


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
