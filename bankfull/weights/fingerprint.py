"""The fingerprint of a model's weights: equal on all machines with the same files, different for other weights.

Every byte counts. Files are hashed once (`file_digests`); later the file system tells that they are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from threading import Thread

from bankfull.errors import ModelError
from bankfull.weights.file_digests import FileState, file_digest, known_digest


def weights_fingerprint(path: Path) -> str:
    """The fingerprint of a model directory or a .gguf file (with its other parts, if it is split): 32 hexadecimal
    digits."""
    fingerprint = _of_digests(path, file_digest)
    assert fingerprint is not None
    return fingerprint


def known_fingerprint(path: Path) -> str | None:
    """The fingerprint if no large file has to be read for it."""
    return _of_digests(path, known_digest)


def _of_digests(path: Path, digest_of: Callable[[Path], bytes | None]) -> str | None:
    digest = hashlib.sha256()
    try:
        for file in _weight_files(path):
            if (found := digest_of(file)) is None:
                return None
            digest.update(f"{file.name}\0".encode() + found)
    except OSError as error:
        raise ModelError(f"The files of {path.name} cannot be read: {error.strerror or error}.") from None
    return digest.hexdigest()[:32]


def weights_stamp(path: Path) -> list[tuple[str, FileState]]:
    """What the file system says of the same files, without reading them. Raises ModelError."""
    try:
        return [(file.name, FileState.of(file)) for file in _weight_files(path)]
    except OSError as error:
        raise ModelError(f"The files of {path.name} cannot be read: {error.strerror or error}.") from None


def fingerprint_beside(path: Path) -> Callable[[], str]:
    """The fingerprint, made by a thread while the model is loaded: a call waits for it."""
    fingerprint: Future[str] = Future()

    def run() -> None:
        try:
            fingerprint.set_result(weights_fingerprint(path))
        except BaseException as error:
            fingerprint.set_exception(error)

    Thread(target=run, name="bankfull-fingerprint", daemon=True).start()
    return cache(fingerprint.result)


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        candidates = [*path.glob("*.safetensors"), *path.glob("*.gguf"), path / "config.json"]
        return sorted((file for file in candidates if file.exists()), key=lambda file: file.name)
    stem, _, parts = path.name.rpartition("-of-")
    if not parts.removesuffix(".gguf").isdigit():
        return [path]
    return sorted(path.parent.glob(f"{stem[:-5]}?????-of-{parts}"), key=lambda file: file.name)
