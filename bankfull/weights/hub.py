"""Models on the Hugging Face hub, by `org/name`, or `org/name/file.gguf` for one file of a GGUF repository.

`huggingface_hub` (an extra) downloads and caches them, controlled by HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bankfull.errors import ModelError

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(?P<file>[^\0]+\.gguf))?")
SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
# The files of a model directory, but nothing executable: no *.bin (pickles), no *.py.
WANTED = ("model*.safetensors", "*.json", "*.jinja", "tokenizer.*", "additional_chat_templates/*.jinja")
REFUSED = ("*.bin", "*.py", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
NAMES_SHOWN = 8
TIMEOUT_SECONDS = 15

log = logging.getLogger("bankfull")


def looks_like_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None


def from_hub(name: str) -> Path:
    """The directory or .gguf file in the hub's local cache; downloaded first if needed."""
    match = HUB_ID.fullmatch(name)
    assert match is not None, name
    repo, file = match["repo"], match["file"]
    hub, offline = _library(name)
    try:
        if offline:
            return _in_snapshot(Path(hub.snapshot_download(repo, local_files_only=True)), repo, file)
        siblings = hub.HfApi().model_info(repo, timeout=TIMEOUT_SECONDS).siblings or []
        wanted, entry = choose([sibling.rfilename for sibling in siblings], repo, file)
        folder = Path(hub.snapshot_download(repo, allow_patterns=_literal(wanted), ignore_patterns=list(REFUSED)))
        return folder / entry
    except ModelError:
        raise
    except Exception as error:  # the library passes on transport errors, which differ by version
        return _after_failure(hub, repo, file, error, offline)


def config_from_hub(name: str) -> Path | None:
    """Only a repository's config.json; None if it has none, as with GGUF files."""
    hub, offline = _library(name)
    try:
        return Path(hub.hf_hub_download(name, "config.json", local_files_only=offline))
    except Exception as error:
        if type(error).__name__ in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            return None
        path = _after_failure(hub, name, None, error, offline)
        return path / "config.json" if path.is_dir() else None


def _library(name: str) -> tuple[Any, bool]:
    """The hub's own package, and whether it may use the network."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.constants import HF_HUB_OFFLINE as OFFLINE
    except ImportError:
        raise ModelError(
            f"{name!r} is not a local path, and reading it from the hub needs a package: pip install 'bankfull[hub]'."
        ) from None
    return hub, bool(OFFLINE)


def choose(files: Sequence[str], repo: str, file: str | None) -> tuple[list[str], str]:
    """The files to download, and the one to open ("" = the directory)."""
    ggufs = [name for name in files if name.endswith(".gguf")]
    if file is not None:
        if file not in ggufs:
            raise ModelError(f"The hub repository {repo} has no file {file!r}; it has {_listed(ggufs)}.")
        return _parts(file, ggufs)
    if any(fnmatchcase(name, "model*.safetensors") for name in files) and "config.json" in files:
        kept = [
            name
            for name in files
            if any(fnmatchcase(name, pattern) and name.count("/") == pattern.count("/") for pattern in WANTED)
        ]
        return [name for name in kept if not any(fnmatchcase(name, pattern) for pattern in REFUSED)], ""
    first = [name for name in ggufs if (m := SPLIT.fullmatch(name)) is None or int(m["part"]) == 1]
    if len(first) == 1:
        return _parts(first[0], ggufs)
    if first:
        raise ModelError(f"Hub repository {repo} holds several GGUF files: name one, as {repo}/FILE: {_listed(first)}.")
    raise ModelError(
        f"The hub repository {repo} holds no model.safetensors with a config.json and no .gguf file; "
        "only these are read: use another repository of this model."
    )


def _parts(file: str, ggufs: Sequence[str]) -> tuple[list[str], str]:
    match = SPLIT.fullmatch(file)
    if match is None:
        return [file], file
    names = [f"{match['stem']}-{n:05d}-of-{match['count']}.gguf" for n in range(1, int(match["count"]) + 1)]
    return [name for name in names if name in ggufs], names[0]


def _in_snapshot(folder: Path, repo: str, file: str | None) -> Path:
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return folder / choose(files, repo, file)[1]


def _after_failure(hub: Any, repo: str, file: str | None, error: Exception, offline: bool) -> Path:
    """If the hub is unreachable, use an earlier download and log a warning."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        raise ModelError(
            f"The hub repository {repo} is gated: accept its terms on its page, then set HF_TOKEN to your token."
        ) from None
    if kind in ("RepositoryNotFoundError", "HFValidationError"):
        raise ModelError(
            f"The hub has no repository {repo}, or your HF_TOKEN may not read it; check the spelling of org/name."
        ) from None
    reason = " ".join(str(error).split())[:200].rstrip(". ") or kind
    try:
        path = _in_snapshot(Path(hub.snapshot_download(repo, local_files_only=True)), repo, file)
    except Exception:
        if offline:
            raise ModelError(
                f"HF_HUB_OFFLINE is set and the hub's cache has no {repo}; unset it to download, or give a local path."
            ) from None
        raise ModelError(
            f"The hub cannot be reached for {repo} ({kind}: {reason}); try again, or give a local path."
        ) from None
    log.warning("The hub cannot be reached (%s: %s); using the copy of %s in its cache.", kind, reason, repo)
    return path


def _literal(names: Sequence[str]) -> list[str]:
    """Names as patterns that match only themselves."""
    return [re.sub(r"([*?[])", r"[\1]", name) for name in names]


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "no .gguf files"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + more
