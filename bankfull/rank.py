"""The process of one rank of a model: `python -m bankfull.rank`, started by rank 0 (`parallel.leading`)."""

from __future__ import annotations

import os
import signal
import socket
import sys


def main() -> int:
    # What only several ranks need: the core works without it.
    import bankfull
    from bankfull.errors import BankfullError
    from bankfull.loading import load_feeds, load_rank
    from bankfull.mesh import MeshSpec
    from bankfull.parallel.following import feed, follow
    from bankfull.parallel.groups import SECONDS, RankLost, RankPlace, join
    from bankfull.parallel.leading import ADDRESS, RANK, SECRET
    from bankfull.parallel.messages import HelloMessage, RankConnection, RankReady, RankTask

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, whose end ends this process
    host, _, port = os.environ.pop(ADDRESS).rpartition(":")
    rank, secret = int(os.environ.pop(RANK)), os.environ.pop(SECRET)
    connection = RankConnection(socket.create_connection((host, int(port)), SECONDS))
    connection.send(HelloMessage(rank, bankfull.__version__, secret))
    task = connection.from_leader(SECONDS)
    if not isinstance(task, RankTask):
        return 1
    try:
        mesh = MeshSpec.parse(str(task.run.parallel))
        device = "cuda" if task.run.device.startswith("cuda") else "cpu"
        ranks = join(RankPlace(mesh, rank), host, task.port, device)
        if ranks.place.feeds:
            feeds = load_feeds(task.model, task.run, task.sched, task.max_len, ranks)
            hot = ranks.hot(feeds.device)
            connection.send(RankReady())
            feed(connection, feeds, hot)
            return 0
        runner = load_rank(task.model, task.run, task.sched, task.state, task.max_len, ranks)
        hot = ranks.hot(runner.device)
        connection.send(RankReady())
        follow(connection, runner, ranks.tells, hot)
    except BankfullError as error:
        connection.send(RankReady(str(error), refused=True))
        return 2
    except RankLost:
        return 1  # rank 0 tells of it
    return 0


if __name__ == "__main__":
    sys.exit(main())
