"""Settings that every test shares."""

import gc
import os

import pytest
import torch

from tests.quick import FULL_EXAMPLES, QUICK_EXAMPLES, is_quick, leave_to_full_runs

# Where there is no GPU, its kernels are tested all the same: as Python, on host tensors. Before anyone imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from tests.interpreter import compute_as_a_device_does

    compute_as_a_device_does()

# Drafts by measured gain depend on the time that steps take. Tests that count steps need the same steps every time;
# those of speculative decoding ask for it.
os.environ.setdefault("BANKFULL_SPECULATIVE", "off")

THREADS = 1
"""Tests run in several processes: one thread each is faster than many, and results do not depend on load."""
torch.set_num_threads(THREADS)

try:
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers
except ModuleNotFoundError:  # a machine that runs `make test-gpu` need not have it
    settings = None


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are imported: their own counts of examples follow from the profile's."""
    if settings is not None:
        # Hypothesis draws some values from the constants of all loaded modules. To read them takes each process ten
        # seconds, and examples would depend on which other tests a process has collected.
        providers._get_local_constants = lambda: providers._local_constants
        for name, count in (("full", FULL_EXAMPLES), ("quick", QUICK_EXAMPLES)):
            settings.register_profile(name, deadline=None, derandomize=True, max_examples=count)
        settings.load_profile("quick" if is_quick(config) else "full")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A model that was loaded has set torch to its own threads, for all tests after it. Those of many small operations
    took up to twenty times as long, because each operation waits for threads that wait for a core."""
    if torch.get_num_threads() != THREADS:
        torch.set_num_threads(THREADS)


def pytest_collection_finish() -> None:
    """What imports and collection have left stays: to look through it takes half a second of each garbage collection.
    The load client asks for one before each run, and would thaw everything behind it; so would a command's start, and
    what it froze for a moment would never be collected."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses. A GPU is quick enough for all of them."""
    if not torch.cuda.is_available():
        leave_to_full_runs(items)
