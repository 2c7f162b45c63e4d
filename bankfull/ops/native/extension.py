"""The compiled module if it exists: whether it is available, its instruction set and its thread count."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from bankfull.errors import ConfigError
from bankfull.ops.native import cores

ISA_VARIABLE = "BANKFULL_ISA"
THREADS_VARIABLE = "BANKFULL_THREADS"
MOST_THREADS = 1024

kernels: ModuleType | None = None
_missing: ImportError | None = None
try:
    kernels = import_module("bankfull._native")
except ImportError as error:
    _missing = error


def status() -> str | None:
    """One line if the kernels are missing, else None."""
    if kernels is not None:
        return None
    if isinstance(_missing, ModuleNotFoundError):
        why = "they were not built; install bankfull where a C++ compiler is present"
    else:
        why = f"they cannot be loaded: {str(_missing).splitlines()[0]}"
    return f"native CPU kernels are missing, so the slower torch operations run ({why})."


def required() -> ModuleType:
    """The kernels, for modules that are imported only if they exist."""
    if kernels is None:
        raise ImportError(status())
    return kernels


@cache
def notify() -> None:
    """Check BANKFULL_ISA and BANKFULL_THREADS, choose the thread count, and print `status` to stderr, once per process.
    Call it before a kit for the CPU is built."""
    select_isa()
    thread_choice()
    line = status()
    if line is not None:
        print(f"bankfull: {line}", file=sys.stderr)


@cache
def select_isa() -> str | None:
    """Apply BANKFULL_ISA and return the active instruction set; called before a kernel is chosen."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    if kernels is None:
        if wanted:
            raise ConfigError(f"{ISA_VARIABLE}={wanted!r} has no effect: {status()}")
        return None
    available: list[str] = kernels.isas()
    if wanted and wanted not in available:
        choices = ", ".join(available)
        raise ConfigError(f"{ISA_VARIABLE}={wanted!r} is not available on this machine; use {choices}, or unset it.")
    if wanted:
        kernels.set_isa(wanted)
    return str(kernels.isa())


def copies_weights() -> bool:
    """Whether GEMMs of many rows use a second copy of quantized weights on this machine (csrc/hadamard.hpp)."""
    return select_isa() is not None and required().hadamard_bytes(0, 32, 64) > 0


_chosen: cores.ThreadChoice | None = None


def threads() -> int:
    """Number of compute threads, including the caller."""
    return thread_choice().threads


def thread_choice() -> cores.ThreadChoice:
    """The thread count and its reason: `set_threads` if called, else BANKFULL_THREADS, else chosen once
    automatically."""
    if _chosen is None:
        wanted = os.environ.get(THREADS_VARIABLE, "")
        if wanted:
            if not (wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= MOST_THREADS):
                raise ConfigError(
                    f"{THREADS_VARIABLE}={wanted!r} is not a number of threads; use 1 to {MOST_THREADS}, or unset it."
                )
            _use(cores.ThreadChoice(int(wanted), f"set by {THREADS_VARIABLE}"))
        else:
            _use(cores.choose_threads(kernels))
    assert _chosen is not None
    return _chosen


def set_threads(count: int) -> None:
    """Set the number of compute threads of the kernels and of torch."""
    if not 1 <= count <= MOST_THREADS:
        raise ConfigError(f"threads={count} is out of range; use 1 to {MOST_THREADS}.")
    _use(cores.ThreadChoice(count, "set by an option"))


def _use(choice: cores.ThreadChoice) -> None:
    global _chosen
    _chosen = choice
    if kernels is not None:
        kernels.set_threads(choice.threads)
    torch.set_num_threads(choice.threads)
