"""Settings that every test shares."""

import torch
from hypothesis import settings

# Tests run in several processes: one thread each is faster than many that compete, and results do not depend on load.
torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
