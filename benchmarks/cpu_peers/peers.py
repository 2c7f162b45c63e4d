"""The peers: how each is prepared, and which files the two sides run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cpu_peers import llamacpp_build, models
from benchmarks.cpu_peers.install import RECIPES, install
from benchmarks.cpu_peers.llamacpp import LlamaCpp
from benchmarks.cpu_peers.vllm_bench import VllmBench

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Place:
    """The model and options of a run, and the folder for its files."""

    model: Path
    folder: Path
    threads: int
    llamacpp: llamacpp_build.Asked = field(default_factory=llamacpp_build.Asked)


@dataclass(frozen=True, slots=True)
class Served:
    """How to start a peer that stays loaded."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    own_tool: VllmBench | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A prepared peer, and the files that each side runs."""

    peer: Served | LlamaCpp
    model: Path
    our_model: Path


Peer = Callable[[Place], Ready]
"""Prepares a peer: installs and converts what is missing."""


def module(python: Path | str, name: str) -> list[str]:
    return [str(python), "-m", f"benchmarks.cpu_peers.{name}"]


def llamacpp(place: Place) -> Ready:
    """The given file for both sides."""
    return _llamacpp(place, models.gguf_only(place.model), llamacpp_build.builds(place.llamacpp, place.folder))


def llamacpp_q4_0(place: Place) -> Ready:
    """The same weights as Q4_0, llama.cpp's fastest type, for both sides."""
    builds = llamacpp_build.builds(place.llamacpp, place.folder)
    quantizer = builds[0].tool(llamacpp_build.QUANTIZE)
    return _llamacpp(place, models.requantized(place.model, place.folder, quantizer, "Q4_0"), builds)


def _llamacpp(place: Place, model: Path, builds: Sequence[llamacpp_build.Build]) -> Ready:
    return Ready(LlamaCpp(builds, model, place.threads, place.folder / "llamacpp.err"), model, model)


def vllm(place: Place) -> Ready:
    """bfloat16 for vLLM, which has no fast 4-bit path on CPUs; the given file for us."""
    python = install(RECIPES["vllm"], place.folder)
    model = models.widened(place.model, place.folder)
    preloaded = _openmp(python.parent.parent / "lib")
    own_tool = VllmBench(python.parent / "vllm", model, place.threads, place.folder / "vllm-bench.err", preloaded)
    return Ready(Served(module(python, "engine_vllm"), preloaded, own_tool), model, place.model)


def _openmp(libraries: Path) -> dict[str, str]:
    """The OpenMP library that vLLM needs preloaded: Intel's, recommended by its manual and included on x86; otherwise
    torch's, without which its threads share a core."""
    packages = "python*/site-packages"
    for pattern in ("libiomp5.so", f"{packages}/torch.libs/libgomp*", f"{packages}/torch/lib/libgomp*"):
        for found in sorted(libraries.glob(pattern)):
            return {"LD_PRELOAD": str(found)}
    return {}


PEERS: Mapping[str, Peer] = {"llamacpp": llamacpp, "llamacpp-q4_0": llamacpp_q4_0, "vllm": vllm}
