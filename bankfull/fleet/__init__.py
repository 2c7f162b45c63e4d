"""Several replicas of one model: their reports, routing and autoscaling. Decisions only: no sockets, no processes."""
