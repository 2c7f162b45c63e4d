"""What is raised when ranks can no longer work together."""


class RankLost(RuntimeError):
    """Another rank has ended, or does not answer: this replica cannot go on."""
