"""The process that has places on Ray for the ranks of one model: `python -m bankfull.cluster.rank_places FD`.

FD is one end of a socket pair. The other one has rank 0, which runs outside of Ray: in an `LLM`, or in a command. When
it closes its end, the ranks end, and Ray gets their resources back.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

import bankfull
from bankfull.cluster.manager import PLACE_SECONDS, in_order
from bankfull.cluster.ray_session import RaySession, folder_for_ray
from bankfull.cluster.replica import HostedRank
from bankfull.cluster.sizes import Share, share_of
from bankfull.errors import BankfullError, ConfigError
from bankfull.parallel.placing import MOST_BYTES, PlacesFound, PlacesWanted


def find_places(session: RaySession, wanted: PlacesWanted) -> tuple[PlacesFound, list[Any]]:
    """A host for each rank but the first, in a placement group with a bundle for every rank: that of rank 0 is on this
    machine, and empty, since rank 0 uses its share of the cores. The hosts end with the list of them, all with the
    session."""
    nodes = session.nodes()
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    share = share_of(cpus, gpus, 1, None, None, "cpu", wanted.ranks)
    if (room := sum(node.room(share.of_rank) for node in nodes)) < wanted.ranks:
        raise ConfigError(
            f"The layout {wanted.layout} has {wanted.ranks} ranks with {share.of_rank.cpus:g} CPUs each, and the Ray "
            f"cluster at {wanted.address} has room for {room} ({cpus:g} CPUs on {len(nodes)} machines); choose a "
            "smaller layout."
        )
    group, ends = session.reserve(share, first_here=True), time.monotonic() + PLACE_SECONDS
    hosts = [_host(session, group, number, share, wanted.token) for number in range(1, wanted.ranks)]
    answers = [host.status.remote() for host in hosts]
    placed, _ = session.ray.wait(answers, num_returns=len(answers), timeout=max(0.0, ends - time.monotonic()))
    if len(placed) < len(answers):
        raise ConfigError(
            f"Ray has not placed the {wanted.ranks} ranks of the layout {wanted.layout} within {PLACE_SECONDS:g} "
            "seconds: other work uses its CPUs; choose a smaller layout, or wait until they are free (`ray status`)."
        )
    statuses = [_status(session, answer) for answer in answers]
    return PlacesFound(list(in_order(session.own_node, statuses)), share.threads), hosts


def _host(session: RaySession, group: Any, number: int, share: Share, token: str) -> Any:
    rank = share.of_rank
    kind = session.ray.remote(HostedRank).options(
        num_cpus=rank.cpus, scheduling_strategy=session.bundle(group, number), max_concurrency=1
    )
    return kind.remote(token, "", share.threads)


def _status(session: RaySession, answer: Any) -> dict[str, Any]:
    try:
        status: dict[str, Any] = session.ray.get(answer)
    except Exception as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConfigError(f"A rank cannot be started on the Ray cluster: {why}") from error
    if status["version"] != bankfull.__version__:
        raise ConfigError(
            f"The node {status['node']} has bankfull {status['version']}, this process {bankfull.__version__}: install "
            "the same version on all nodes."
        )
    return status


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides
    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection.makefile("rb") as lines, folder_for_ray() as folder, suppress(OSError):  # rank 0 may be gone
        wanted = msgspec.json.decode(lines.readline(MOST_BYTES), type=PlacesWanted)
        session, hosts = None, list[Any]()
        try:
            session = RaySession(wanted.address, folder)
            answer, hosts = find_places(session, wanted)
        except BankfullError as error:
            answer = PlacesFound(problem=str(error))
        try:
            connection.sendall(msgspec.json.encode(answer) + b"\n")
            lines.read(1)  # until rank 0 has ended
        finally:
            hosts.clear()
            if session is not None:
                session.close()


if __name__ == "__main__":
    main()
