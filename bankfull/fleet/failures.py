"""How long a front waits when replicas fail. The server and the planner's simulation use the same times."""

from __future__ import annotations

PATIENCE = 60.0
"""Seconds without any ready replica after which a stream is given up; a model of 8 B parameters is loaded again in
about 30."""
QUIET_SECONDS = 0.75
"""Seconds without a heartbeat, which is three of them, after which the front probes a replica's machine."""
PROBE_SECONDS = 0.75
"""Seconds in which its kernel must acknowledge a probe; TCP repeats a lost packet after 0.2 and 0.6 seconds. A machine
that does not is without power or network, and counts as gone."""
