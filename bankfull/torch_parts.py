"""Parts of torch that a start of the program can do without.

A third of the time to import torch goes to the shapes of its operations on meta tensors, which are written in Python.
The program's own processes leave them out. Whoever needs one of them gets them all, late: an attribute of a module that
was left out imports it, and so does `complete`. Tensors without data still have the shapes that torch computes in C++;
what meets another one is tried again with all (`with_all`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")
LEFT_OUT = ("torch._meta_registrations", "torch.distributed._meta_registrations")


class _Absent(Loader):
    """Makes a module without content, whose first attribute is looked up in the real one."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def look_up(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            complete()
            return getattr(sys.modules[name], attribute)

        module.__getattr__ = look_up  # type: ignore[method-assign]


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, _Absent()) if name in LEFT_OUT else None


def leave_out() -> None:
    """Import torch without these parts from now on; nothing happens if it is imported already."""
    if "torch" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def complete() -> bool:
    """Import what was left out. Whether there was anything."""
    missing = [name for name in LEFT_OUT if isinstance(_loader(name), _Absent)]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in missing:
        del sys.modules[name]
    for name in missing:
        import_module(name)
    return bool(missing)


def with_all(run: Callable[[], Result]) -> Result:
    """The result of `run`, which may need what was left out, and can run twice."""
    try:
        return run()
    except NotImplementedError:
        if not complete():
            raise
        return run()


def _loader(name: str) -> object:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return None if spec is None else spec.loader
