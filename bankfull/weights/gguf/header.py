"""The header of a GGUF file, before its tensors. Does not import torch, for users that need only the metadata."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from bankfull.errors import ModelError
from bankfull.weights.gguf.values import Cursor, Metadata, find_values

MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Metadata
    tensors: int
    """Number of tensor descriptions that follow."""
    cursor: Cursor
    """Positioned after the metadata."""


def open_header(path: Path) -> Header:
    cursor = Cursor(_map(path), path.name)
    magic = cursor.data[cursor.take(4, "its magic number") : cursor.at]
    if magic != MAGIC:
        raise ModelError(f"{path.name} is not a GGUF file: it does not begin with the letters GGUF")
    version = cursor.u32("its version")
    if version not in (2, 3):
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in (1, 2, 3)
        kind = "big-endian" if big_endian else f"of version {version}"
        raise ModelError(f"{path.name} is a GGUF file {kind}: only little-endian files of version 2 and 3 are read")
    tensor_count, value_count = cursor.u64("its tensor count"), cursor.u64("its metadata count")
    return Header(find_values(cursor, value_count), tensor_count, cursor)


def _map(path: Path) -> mmap.mmap:
    try:
        # O_NONBLOCK: a named pipe must be rejected below, not waited for.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise ModelError(f"{path} cannot be opened: {error.strerror or error}") from None
    except ValueError:
        raise ModelError(f"{str(path)!r} is not a path: it contains a zero byte") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file: give the path of a .gguf file")
        if status.st_size == 0:
            raise ModelError(f"{path.name} is empty: download it again")
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
    except (OSError, OverflowError) as error:
        raise ModelError(f"{path} cannot be mapped into memory: {error}") from None
    finally:
        os.close(descriptor)
