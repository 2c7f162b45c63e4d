"""What this build computes with: the digest of its own source files and native library.

The version number stays the same between two builds. What is kept on disk is bound to the build that has computed it,
because the next one may round, draft or sample otherwise.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

import bankfull

PACKAGE = Path(bankfull.__file__).parent
COUNTED = frozenset({".py", ".so", ".pyd", ".json"})
"""Code, and the tables that it reads."""


@cache
def build_stamp() -> str:
    """What the file system says of the same files, without reading them: another stamp for every other build, but also
    for the same one installed twice."""
    stamp = blake2b(digest_size=16)
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in COUNTED):
        status = path.stat()
        stamp.update(f"{path.relative_to(PACKAGE).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return stamp.hexdigest()


@cache
def build_digest() -> str:
    """The version, and 16 hexadecimal digits. The same for the same files, wherever they lie."""
    digest = blake2b(digest_size=8)
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in COUNTED):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return f"{bankfull.__version__}+{digest.hexdigest()}"
