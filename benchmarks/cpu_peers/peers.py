"""Each peer: how it gets ready, and which files the two sides run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cpu_peers import models
from benchmarks.cpu_peers.install import RECIPES, install

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run keeps things, and what it compares."""

    model: Path
    folder: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that can be started, and the files that each side runs."""

    command: Sequence[str]
    model: Path
    our_model: Path
    variables: Mapping[str, str] = field(default_factory=dict)


Peer = Callable[[Place], Ready]
"""Installs and converts whatever is missing."""


def module(python: Path | str, name: str) -> list[str]:
    return [str(python), "-m", f"benchmarks.cpu_peers.{name}"]


def llamacpp(place: Place) -> Ready:
    """The file as it is, for both."""
    model = models.gguf_only(place.model)
    return Ready(module(install(RECIPES["llamacpp"], place.folder), "engine_llamacpp"), model, model)


def llamacpp_q4_0(place: Place) -> Ready:
    """The same numbers as Q4_0, llama.cpp's fastest type, for both."""
    python = install(RECIPES["llamacpp"], place.folder)
    model = models.requantized(place.model, place.folder, python, "Q4_0", ROOT)
    return Ready(module(python, "engine_llamacpp"), model, model)


def vllm(place: Place) -> Ready:
    """bfloat16 for the peer, which has no fast 4-bit path on CPUs; the file as it is for us."""
    python = install(RECIPES["vllm"], place.folder)
    model = models.widened(place.model, place.folder)
    # Its manual asks for this library, which comes with it, in place of the compiler's own.
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    preloaded = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return Ready(module(python, "engine_vllm"), model, place.model, preloaded)


PEERS: Mapping[str, Peer] = {"llamacpp": llamacpp, "llamacpp-q4_0": llamacpp_q4_0, "vllm": vllm}
