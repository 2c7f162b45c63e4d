"""Products with 2:4 sparse weights."""
