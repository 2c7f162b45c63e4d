"""Every storage scheme that the engine reads, by name. A file of this folder with `SCHEMES` is found by itself."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from bankfull.weights.scheme import Scheme


def _found() -> Iterator[Scheme]:
    for file in iter_modules(__path__):
        yield from import_module(f"{__name__}.{file.name}").SCHEMES


_FOUND: dict[str, Scheme] = {scheme.name: scheme for scheme in _found()}
READ_ONLY = {name: scheme for name, scheme in _FOUND.items() if scheme.is_rounded and not scheme.is_encoded}
"""Schemes of files that nothing is quantized to."""
SCHEMES = {name: scheme for name, scheme in _FOUND.items() if name not in READ_ONLY}
