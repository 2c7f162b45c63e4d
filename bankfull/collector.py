"""The garbage collector of a process that this package starts: of a command, or of an engine.

A program that imports `bankfull` controls its own.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Turns garbage collection off for the time in which modules are imported and a model is loaded."""
    # Modules and a model's parts live as long as the process. Searching them for garbage again and again took a tenth
    # of the start, and searching them once at its end another twentieth.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation; objects that are frozen at exit would be reported as leaked
        gc.enable()
