"""A seeded simulator: the real scheduler and state, and a fake device that tracks the content of each page.

Replay one seed with `python -m tests.sim SEED`, a range with `python -m tests.sim FIRST COUNT`.
"""

from tests.sim.world import SimulationError, simulate

__all__ = ["SimulationError", "simulate"]
