"""Resolves a model name to files on this machine.

Short names and presets come first, so that the default model never depends on the current directory (`./smollm2` names
a directory of that name); then paths; then hub ids.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from bankfull.errors import ModelError
from bankfull.weights import fetch
from bankfull.weights.hub import from_hub, looks_like_hub_id
from bankfull.weights.presets import preset, preset_names

DEFAULT_MODEL = "smollm2"
LONGEST_NAME = 4096
SIBLINGS_READ = 10_000


def locate(name: str, report: fetch.Report | None = None) -> Path:
    """A model directory or .gguf file; downloads it if it is missing. `report` replaces the progress on stderr."""
    if not name or "\0" in name or len(name) > LONGEST_NAME:
        raise ModelError(f"{name[:80]!r} is not a model name: give a path, a hub id (org/name) or {_short_names()}.")
    if name in fetch.SHORT_NAMES:
        model = fetch.SHORT_NAMES[name]
        file = fetch.installed(model) or fetch.cached(name, model) or fetch.fetch(name, model, report)
        return fetch.verified(file, name, model)
    if (folder := preset(name)) is not None:
        return folder
    path = _expanded(name)
    try:
        if path.is_dir():
            return _in_directory(path)
        if path.exists():
            return path
    except OSError as error:
        raise ModelError(f"{name[:80]!r} is not a usable path: {error.strerror or error}.") from None
    if looks_like_hub_id(name) and not _meant_as_path(name, path):
        return from_hub(name)
    raise ModelError(_not_found(name, path))


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def _in_directory(path: Path) -> Path:
    """A directory without config.json that contains one GGUF model stands for that model."""
    if (path / "config.json").exists():
        return path
    first = [p for p in sorted(path.glob("*.gguf")) if "-of-" not in p.name or "-00001-of-" in p.name]
    return first[0] if len(first) == 1 else path  # opening the directory raises a clear error


def _meant_as_path(name: str, path: Path) -> bool:
    """`models/llama` is a misspelled path, not a hub organization, if `models` is a directory here."""
    return name.startswith((".", "~")) or path.parent.is_dir()


def _not_found(name: str, path: Path) -> str:
    if path.parent.is_dir() and ("/" in name or path.suffix):
        near = _nearest(path.name, _siblings(path.parent))
        if near is not None:
            return f"There is no model {name!r}: did you mean {str(path.with_name(near))!r}?"
        return f"There is no model {name!r}: the directory {str(path.parent)!r} has nothing of a similar name."
    near = _nearest(name, [*fetch.SHORT_NAMES, *preset_names()])
    hint = f"did you mean {near!r}?" if near else f"give a path, a hub id (org/name) or {_short_names()}."
    return f"There is no model {name!r}, neither as a path nor as a short name: {hint}"


def _siblings(folder: Path) -> list[str]:
    try:
        return [p.name for p, _ in zip(folder.iterdir(), range(SIBLINGS_READ), strict=False)]
    except OSError:
        return []


def _nearest(name: str, names: list[str]) -> str | None:
    folded = {n.lower(): n for n in names}
    matches = get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def _short_names() -> str:
    return "a short name: " + ", ".join(f"{name!r}" for name in sorted(fetch.SHORT_NAMES))
