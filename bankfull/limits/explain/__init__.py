"""Where the time of a request went, and what would make it faster."""
