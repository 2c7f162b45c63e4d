"""llama.cpp's tools: from a given folder of programs, or built here for this machine.

The source is that of a pinned release of llama-cpp-python, or a given source tree. Building needs only cmake and a
compiler, so a machine without a network needs only the tree.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu_peers.install import STAMP, CannotInstall, run_steps

VERSION = "0.3.36"
PACKAGE = "llama-cpp-python"
BENCH, BATCHED, QUANTIZE = "llama-bench", "llama-batched-bench", "llama-quantize"
TOOLS = (BENCH, BATCHED, QUANTIZE)
LOOKUP = "llama-lookup"
"""llama.cpp's example of prompt lookup, which is built only for the comparison that needs it."""
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)
AMX_OPTIONS = ("-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",)
"""gcc 12 removes the stores to the AMX tile configuration as dead, and then the first tile instruction fails."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Source of llama.cpp; fetched and built by default."""

    programs: tuple[Path, ...] = ()
    """Folders of built tools; with several, the fastest counts for each work."""
    source: Path | None = None
    kleidiai: Path | None = None
    """Source tree of Arm's KleidiAI kernels, for a second build with them."""


@dataclass(frozen=True, slots=True)
class Build:
    name: str
    """Name for the table."""
    variant: str
    """Difference from the other builds of a run."""
    programs: Path

    def tool(self, name: str) -> str:
        return str(self.programs / name)


def builds(asked: Asked, work: Path) -> list[Build]:
    """At least one build; compiler output goes to `work/llamacpp.log`."""
    if asked.programs:
        several = len(asked.programs) > 1
        return [_given(folder, several) for folder in asked.programs]
    variants: list[tuple[str, str, tuple[str, ...]]] = [("build", "", ())]
    if asked.kleidiai is not None:
        if not (asked.kleidiai / "CMakeLists.txt").is_file():
            raise CannotInstall(f"{asked.kleidiai} is not a source tree of KleidiAI: it has no CMakeLists.txt")
        with_kernels = ("-DGGML_CPU_KLEIDIAI=ON", f"-DFETCHCONTENT_SOURCE_DIR_KLEIDIAI={asked.kleidiai.resolve()}")
        variants.append(("build-kleidiai", "with KleidiAI", with_kernels))
        variants[0] = ("build", "without KleidiAI", ())
    name, source = _source(asked, work)
    every = (*OPTIONS, *for_this_cpu())
    return [
        Build(name, variant, _built(source, work, folder, (*every, *options))) for folder, variant, options in variants
    ]


def lookup_build(asked: Asked, work: Path) -> Build:
    """The first build, with `LOOKUP` among its programs."""
    build = builds(asked, work)[0]
    if os.access(build.tool(LOOKUP), os.X_OK):
        return build
    if asked.programs:
        raise CannotInstall(f"{build.programs} has no {LOOKUP}: build llama.cpp with its examples, or leave it out")
    folder, (_, source) = build.programs.parent, _source(asked, work)
    jobs = str(len(os.sched_getaffinity(0)))
    steps = [
        ["cmake", "-S", str(source), "-B", str(folder), "-DLLAMA_BUILD_EXAMPLES=ON"],
        ["cmake", "--build", str(folder), "--parallel", jobs, "--target", LOOKUP],
    ]
    run_steps("llama.cpp", steps, work / "llamacpp.log")
    return build


def _given(folder: Path, several: bool) -> Build:
    missing = [tool for tool in TOOLS if not os.access(folder / tool, os.X_OK)]
    if missing:
        raise CannotInstall(f"{folder} has no {', '.join(missing)}: give the folder of a llama.cpp build's programs")
    if several:
        return Build("llama.cpp", f"the build in {folder}", folder)
    return Build(f"llama.cpp in {folder}", "", folder)


def _source(asked: Asked, work: Path) -> tuple[str, Path]:
    if asked.source is None:
        return f"llama.cpp of {PACKAGE} {VERSION}", _fetched(work)
    if not (asked.source / "tools" / "llama-bench").is_dir():
        raise CannotInstall(f"{asked.source} is not a source tree of llama.cpp: it has no tools/llama-bench")
    return f"llama.cpp from {asked.source.resolve()}", asked.source.resolve()


def _fetched(work: Path) -> Path:
    folder = work / "llamacpp"
    top = f"{PACKAGE.replace('-', '_')}-{VERSION}"
    source, archive = folder / top / "vendor" / "llama.cpp", folder / f"{top}.tar.gz"
    if not (folder / top / STAMP).exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(folder)]
        run_steps("llama.cpp", [[*pip, f"{PACKAGE}=={VERSION}"]], work / "llamacpp.log")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (folder / top / STAMP).touch()
        archive.unlink()
    return source


def _built(source: Path, work: Path, folder: str, options: Sequence[str]) -> Path:
    """The folder of its programs; built once, and again if the source or an option changes."""
    build = work / "llamacpp" / folder
    key = hashlib.sha256("\n".join([str(source), *options]).encode()).hexdigest()
    stamp = build / STAMP
    if not stamp.exists() or stamp.read_text() != key:
        build.mkdir(parents=True, exist_ok=True)
        jobs = str(len(os.sched_getaffinity(0)))
        steps = [
            ["cmake", "-S", str(source), "-B", str(build), *options],
            ["cmake", "--build", str(build), "--parallel", jobs, "--target", *TOOLS],
        ]
        run_steps("llama.cpp", steps, work / "llamacpp.log")
        stamp.write_text(key)
    return build / "bin"


def for_this_cpu() -> tuple[str, ...]:
    try:
        return AMX_OPTIONS if "amx_tile" in Path("/proc/cpuinfo").read_text() else ()
    except OSError:
        return ()
