"""What a command leaves undone until its first token: the engine is the same, it is there sooner.

For the command line alone. A program that imports `bankfull` has a torch and a garbage collector of its own, and they
are not ours to change.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FOR_COMPILERS = "torch._meta_registrations"
"""What comes of hundreds of operations when they are traced, in Python: a quarter of torch's import. Traces are made by
compilers, and no command compiles with torch."""


@contextmanager
def soon() -> Iterator[None]:
    """While the engine's modules are imported and a model is loaded."""
    # Modules and a model's parts live as long as the process. To look for garbage among them again and again took a
    # tenth of the time until they were there, and to look once when they were took another twentieth.
    gc.disable()
    try:
        _import_torch()
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # into the oldest generation; what is frozen at the end would be reported as leaked
        gc.enable()


def _import_torch() -> None:
    if "torch" in sys.modules:
        return
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # of devices that this engine does not run on
    later = Later(FOR_COMPILERS)
    sys.meta_path.insert(0, later)
    import torch  # noqa: F401

    later.watch()


class Later(MetaPathFinder, Loader):
    """Has one module of a package stay empty until a module of that package is asked for that the package itself had
    not imported: what is not there yet may build on it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._package = name.partition(".")[0] + "."
        self._watches = False
        self._left: tuple[ModuleType, Loader] | None = None

    def watch(self) -> None:
        """The package is there."""
        self._watches = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._watches and fullname.startswith(self._package):
            sys.meta_path.remove(self)
            if self._left is not None:
                module, loader = self._left
                loader.exec_module(module)
        elif fullname == self._name:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader_state, spec.loader = spec.loader, self
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        self._left = module, module.__spec__.loader_state
