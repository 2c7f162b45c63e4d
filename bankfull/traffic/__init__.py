"""What a server has to bear and to keep: when requests arrive, and the objectives on their latency."""
