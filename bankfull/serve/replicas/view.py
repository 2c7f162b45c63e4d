"""One replica as the console, the metrics and the command line show it."""

from __future__ import annotations

import msgspec

from bankfull.serve.engine.wire import Load


class ReplicaView(msgspec.Struct, kw_only=True):
    name: str
    state: str
    """loading, ready, restarting, draining, refused or failed."""
    problem: str
    """Why it is refused or failed, in one sentence for the operator; empty otherwise."""
    device: str
    """cpu or cuda; empty until the model is loaded."""
    weights: str
    """Fingerprint of its weights; empty until they are loaded."""
    rows: int
    """Sequences that it runs at once."""
    requests: int
    """Requests of this front that it runs or queues."""
    batch: int
    """Batch sequences among them, which online requests overtake."""
    load: Load | None
    """The engine's counters after its last step; None without an engine or before its first step."""
    prefix_keys: int
    """Pages of its prefix cache that the front knows."""
    hit_rate: float | None
    """Fraction of prompt tokens found in its prefix cache since its engine started; None before the first prompt."""
    restarts: int
    failed_loads: int
    resumed: int
    """Requests that left it unfinished and continued on another replica."""
