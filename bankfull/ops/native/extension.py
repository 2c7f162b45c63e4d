"""The compiled module, where there is one: is it here, which instruction set runs, on how many threads."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from bankfull.errors import ConfigError

ISA_VARIABLE = "BANKFULL_ISA"

kernels: ModuleType | None = None
_missing: ImportError | None = None
try:
    kernels = import_module("bankfull._native")
except ImportError as error:
    _missing = error


def status() -> str | None:
    """One line when the kernels are missing, None when they are there."""
    if kernels is not None:
        return None
    if isinstance(_missing, ModuleNotFoundError):
        why = "they were not built; install bankfull where a C++ compiler is present"
    else:
        why = f"they cannot be loaded: {str(_missing).splitlines()[0]}"
    return f"native CPU kernels are missing, so the slower torch operations run ({why})."


def required() -> ModuleType:
    """The kernels, for modules that are imported only where they exist."""
    if kernels is None:
        raise ImportError(status())
    return kernels


@cache
def notify() -> None:
    """For whoever builds a kit for the CPU: checks BANKFULL_ISA, and prints `status` to stderr, once per process."""
    select_isa()
    line = status()
    if line is not None:
        print(f"bankfull: {line}", file=sys.stderr)


@cache
def select_isa() -> str | None:
    """Apply BANKFULL_ISA and return the instruction set that runs; called before a kernel is chosen."""
    wanted = os.environ.get(ISA_VARIABLE, "")
    if kernels is None:
        if wanted:
            raise ConfigError(f"{ISA_VARIABLE}={wanted!r} has nothing to choose from: {status()}")
        return None
    available: list[str] = kernels.isas()
    if wanted and wanted not in available:
        choices = ", ".join(available)
        raise ConfigError(f"{ISA_VARIABLE}={wanted!r} is not available on this machine; use {choices}, or unset it.")
    if wanted:
        kernels.set_isa(wanted)
    return str(kernels.isa())


def copies_weights() -> bool:
    """Do products of many rows have a second copy of quantized weights here (csrc/mixing.hpp)?"""
    return select_isa() is not None and required().mixed_bytes(0, 32, 64) > 0


def threads() -> int:
    """How many threads the kernels use, the caller's included; without kernels, what torch uses."""
    if kernels is not None:
        return int(kernels.threads())
    return torch.get_num_threads()


def set_threads(count: int) -> None:
    """Set how many threads compute, for the kernels and for the torch bodies between them."""
    if not 1 <= count <= 1024:
        raise ConfigError(f"threads={count} is out of range; use 1 to 1024.")
    if kernels is not None:
        kernels.set_threads(count)
    torch.set_num_threads(count)
