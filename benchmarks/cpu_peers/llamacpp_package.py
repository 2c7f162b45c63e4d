"""python -m benchmarks.cpu_peers.llamacpp_package: llama.cpp as a Python package, compiled for this machine.

For tests that read our files with llama.cpp (`make test-llamacpp`). The release and the compiler's options are those of
the comparisons.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bankfull.paths import cache_dir
from benchmarks.cpu_peers.install import CannotInstall, Recipe, environment, install, is_installed
from benchmarks.cpu_peers.llamacpp_build import PACKAGE, VERSION, for_this_cpu


def recipe() -> Recipe:
    # The image library is a third of the compilation. An option with spaces is one word inside of quotes.
    options = ("-DGGML_NATIVE=ON", "-DLLAVA_BUILD=OFF", *for_this_cpu())
    variables = {"CMAKE_ARGS": " ".join(f"'{option}'" for option in options)}
    return Recipe("llamacpp-package", (f"{PACKAGE}=={VERSION}", "numpy"), ("--no-binary", PACKAGE), variables)


def folder() -> Path:
    """Where peers are installed unless another folder is given."""
    return cache_dir() / "cpu_peers"


def installed() -> Path | None:
    """The Python that imports llama_cpp; None if it is not installed."""
    return environment(recipe(), folder()) if is_installed(recipe(), folder()) else None


def main() -> int:
    try:
        if installed() is None:
            print(f"compiling {PACKAGE} {VERSION}: about ten minutes on two cores", file=sys.stderr, flush=True)
        print(install(recipe(), folder()))
    except CannotInstall as error:
        print(f"llamacpp_package: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
