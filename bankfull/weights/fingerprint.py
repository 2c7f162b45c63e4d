"""The fingerprint of a model's weights: equal on all machines with the same files, different for other weights.

A file is read whole up to WHOLE_BYTES. Of a larger one its first block, its last block and blocks at even distances are
read, at most SAMPLED_BYTES in all, so that a model of 140 GB takes no longer than a small one. Training changes nearly
every weight, so that a sample shows it. A change of a few bytes in a large file may be missed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from bankfull.errors import ModelError

WHOLE_BYTES = 64 << 20
"""Bytes of a file that is read whole."""
SAMPLED_BYTES = 64 << 20
"""Bytes that are read of all larger files together."""
BLOCK = 16 << 10


def weights_fingerprint(path: Path) -> str:
    """Of a model directory or a .gguf file (with its other parts, if it is split): 32 hexadecimal digits."""
    try:
        files = _weight_files(path)
        sizes = [file.stat().st_size for file in files]
        large = sum(size for size in sizes if size > WHOLE_BYTES)
        digest = hashlib.sha256()
        for file, size in zip(files, sizes, strict=True):
            digest.update(f"{file.name}\0{size}\0".encode())
            share = 1.0 if size <= WHOLE_BYTES else SAMPLED_BYTES / large
            with file.open("rb", buffering=0) as opened:
                for start in _starts(size, share):
                    digest.update(os.pread(opened.fileno(), BLOCK, start))
    except OSError as error:
        raise ModelError(f"The files of {path.name} cannot be read: {error.strerror or error}.") from None
    return digest.hexdigest()[:32]


def _starts(size: int, share: float) -> Iterable[int]:
    """Where the blocks begin that are read: all of them, or this share from the first to the last."""
    count = max(2, int(size * share) // BLOCK)
    if share >= 1.0 or count * BLOCK >= size:
        return range(0, size, BLOCK)
    return ((size - BLOCK) * block // (count - 1) for block in range(count))


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        found = [*path.glob("*.safetensors"), *path.glob("*.gguf"), path / "config.json"]
        return sorted((file for file in found if file.exists()), key=lambda file: file.name)
    stem, _, parts = path.name.rpartition("-of-")
    if not parts.removesuffix(".gguf").isdigit():
        return [path]
    return sorted(path.parent.glob(f"{stem[:-5]}?????-of-{parts}"), key=lambda file: file.name)
