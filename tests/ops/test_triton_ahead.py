"""Kernels that several threads compile and load."""

from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from time import sleep
from types import ModuleType

import pytest

pytest.importorskip("triton")

from triton.runtime import build

from bankfull.ops.triton.ahead import loading_one_by_one


def test_launchers_are_loaded_one_by_one_and_only_within_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = Lock()

    def load(name: str, path: str) -> ModuleType:
        assert inside.acquire(blocking=False), "two threads load at once"
        sleep(0.005)
        inside.release()
        return ModuleType(path)

    monkeypatch.setattr(build, "_load_module_from_path", load)
    with loading_one_by_one(), ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(build._load_module_from_path, ["launcher"] * 8, map(str, range(8))))
    assert [module.__name__ for module in loaded] == list(map(str, range(8)))
    assert build._load_module_from_path is load
