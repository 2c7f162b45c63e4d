"""Settings that every test shares."""

import os

import torch

# Where there is no GPU, its kernels are tested all the same: as Python, on host tensors. Before anyone imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from tests.interpreter import compute_as_a_device_does

    compute_as_a_device_does()

# Tests run in several processes: one thread each is faster than many that compete, and results do not depend on load.
torch.set_num_threads(1)

try:
    from hypothesis import settings
except ModuleNotFoundError:  # a machine that runs `make test-gpu` need not have it
    pass
else:
    settings.register_profile("ci", deadline=None, derandomize=True)
    settings.load_profile("ci")
