"""What happens to a simulated fleet during its day."""

from __future__ import annotations

from dataclasses import dataclass, field

from bankfull.fleet.replica_range import ReplicaRange
from bankfull.traffic.slo import Slo


@dataclass(frozen=True, slots=True)
class FleetOptions:
    replicas: ReplicaRange
    routing: str = "prefix"
    start_seconds: float = 60.0
    """Time from the start of a replica until it is ready."""
    mtbf_hours: float | None = None
    """Mean time between failures of one replica, in hours of the day; None: nothing fails."""
    node_size: int = 8
    """Replicas of one machine."""
    node_failures: float = 0.2
    """Fraction of the failures that end a whole machine."""
    update_at: float | None = None
    """Fraction of the day at which a rolling update begins; None: no update."""
    update_share: float = 0.02
    """Fraction of the replicas that an update restarts at once, at least one."""
    grace: float = 30.0
    """Seconds that requests may take to finish on a replica that is drained."""
    slo: Slo = field(default_factory=Slo)
    """Latency objectives that the autoscaler follows."""
    seed: int = 0
    stepped: bool = False
    """Whether every step runs through the engine, with tokens whose blocks are hashed; slow, and equal to the result
    without."""
