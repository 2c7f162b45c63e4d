"""KV pages: writes, moves and rounded pages."""
