"""Settings that every test shares."""

import os

import torch
from hypothesis import settings

# Where there is no GPU, its kernels are tested all the same: as Python, on host tensors. Before anyone imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from tests.interpreter import compute_as_a_device_does

    compute_as_a_device_does()

# Tests run in several processes: one thread each is faster than many that compete, and results do not depend on load.
torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
