"""A seeded simulator of busy days: the real scheduler and state, a fake device that remembers the content of each page.

Replay one seed with `python -m tests.sim SEED`, a range with `python -m tests.sim FIRST COUNT`.
"""

from tests.sim.world import SimulationError, simulate

__all__ = ["SimulationError", "simulate"]
