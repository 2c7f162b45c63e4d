"""The process of one rank of a model: `python -m bankfull.parallel.rank FD [SECRETS]`. FD is its end of a connection to
rank 0. Started by rank 0 (`parallel.leading`), or by the rank's host (`parallel.hosting`), which has SECRETS for it, a
file for `handshake.inherited`."""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.parallel.messages import RankConnection, RankTask


def main() -> int:
    # What only several ranks need: the core works without it.
    import bankfull
    from bankfull.handshake.inherited import inherit
    from bankfull.parallel.groups import Bounds
    from bankfull.parallel.messages import HelloMessage, RankConnection, RankTask

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, whose end ends this process
    if len(sys.argv) > 2:
        inherit(int(sys.argv[2]))
    connection = RankConnection(socket.socket(fileno=int(sys.argv[1])), "rank 0")
    threading.Thread(target=_end_with, args=(connection.fileno(),), name="bankfull-watcher", daemon=True).start()
    connection.send(HelloMessage(bankfull.__version__, platform.node()))
    task = connection.from_leader(Bounds().begin)
    return work(connection, task) if isinstance(task, RankTask) else 1


def work(connection: RankConnection, task: RankTask) -> int:
    """Read the rank's part of the model, and run the steps that rank 0 plans; the exit status."""
    import torch

    from bankfull.errors import BankfullError, RankLost
    from bankfull.handshake.inherited import inherited
    from bankfull.parallel.following import feed, follow, load_feeds, load_rank
    from bankfull.parallel.groups import join
    from bankfull.parallel.messages import RankReady
    from bankfull.ranks.mesh import MeshSpec
    from bankfull.ranks.place import RankPlace

    try:
        mesh = MeshSpec.parse(str(task.run.parallel))
        device = "cuda" if task.run.device.startswith("cuda") else "cpu"
        if ":" in task.run.device:
            torch.cuda.set_device(task.run.device)  # where collectives make their tensors
        ranks = join(RankPlace(mesh, task.rank), task.meeting, connection.host, device, inherited().meeting)
        ranks.wait_at_most(task.bounds.load)
        if ranks.place.feeds:
            feeds = load_feeds(task.model, task.run, task.sched, task.max_len, ranks)
            steps = partial(feed, connection, feeds, ranks.hot(feeds.device))
        else:
            runner = load_rank(task.model, task.run, task.sched, task.state, task.max_len, ranks)
            steps = partial(follow, connection, runner, ranks.tells, ranks.hot(runner.device))
        ranks.wait_at_most(task.bounds.collective)
        connection.send(RankReady(weights=_fingerprint(task)))
    except RankLost:
        return 1  # rank 0 tells of it
    except BankfullError as error:
        connection.send(RankReady(str(error), refused=True))
        return 2
    except Exception as error:
        traceback.print_exc()
        connection.send(RankReady(f"{type(error).__name__}: {error}"))
        return 1
    try:
        steps()
    except RankLost:
        return 1
    return 0


def _fingerprint(task: RankTask) -> str:
    from bankfull.weights.fingerprint import weights_fingerprint
    from bankfull.weights.locate import locate

    return weights_fingerprint(locate(task.model)) if task.apart else ""


def _end_with(connection: int) -> None:
    """Runs on a thread: the process exits with rank 0, or with the process that has started it, even in the middle of a
    collective. It has no state worth saving."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.register(0, 0)  # a pipe of the starter, or nothing that ends
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
