"""What this build computes with: the digest of its own source files and native library.

The version number stays the same between two builds. What is kept on disk is bound to the build that has computed it,
because the next one may round, draft or sample otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import bankfull

PACKAGE = Path(bankfull.__file__).parent
COUNTED = frozenset({".py", ".so", ".pyd", ".json"})
"""Code, and the tables that it reads."""


def stamp_now(*rooms: str) -> str:
    """What the file system says of the native library and of these folders' files, without reading them: another stamp
    for every other build, but also for the same one installed twice. It takes milliseconds."""
    stamp = blake2b(digest_size=16)
    found = [_stats(os.fspath(PACKAGE), deep=False), *(_stats(os.fspath(PACKAGE / room)) for room in rooms)]
    for name, size, modified in sorted(chain(*found)):
        stamp.update(f"{name}\0{size}\0{modified}\0".encode())
    return stamp.hexdigest()


build_stamp = cache(stamp_now)


def _stats(folder: str, deep: bool = True) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _stats(entry.path) if deep else ()
            elif os.path.splitext(entry.name)[1] in COUNTED:
                status = entry.stat()
                yield entry.path, status.st_size, status.st_mtime_ns


@cache
def build_digest() -> str:
    """The version, and 16 hexadecimal digits. The same for the same files, wherever they lie."""
    digest = blake2b(digest_size=8)
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in COUNTED):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return f"{bankfull.__version__}+{digest.hexdigest()}"
