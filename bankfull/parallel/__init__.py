"""One model over several ranks: groups of processes, the plan's way to them, and how they start and end."""
