"""Two engines or servers on the same work, in alternating pairs."""
