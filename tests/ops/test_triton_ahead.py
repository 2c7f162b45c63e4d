"""Kernels that several threads compile and load."""

from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import sleep
from types import ModuleType

import pytest

pytest.importorskip("triton")

from triton.runtime import build

from bankfull.ops.triton.ahead import serialized_loading


def test_each_thread_gets_the_launcher_that_it_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded as Python does it: the single module of that name is refilled on every load."""
    shared, inside = ModuleType("launcher"), Lock()

    def load(name: str, path: str) -> ModuleType:
        assert inside.acquire(blocking=False), "two threads load at once"
        shared.__dict__["launch"] = path
        sleep(0.005)
        inside.release()
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    paths = list(map(str, range(8)))
    with serialized_loading(), ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(build._load_module_from_path, ["launcher"] * 8, paths))
    assert [module.launch for module in loaded] == paths
    assert build._load_module_from_path is load
