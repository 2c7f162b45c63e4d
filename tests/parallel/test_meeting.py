"""Ranks meet among themselves: nobody else takes part, or connects when they have met."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bankfull.errors import RankLost
from bankfull.parallel.groups import Ranks, join
from bankfull.parallel.meeting import KEY, GlooDevice, Meeting, SealedStore, deafen, prove_members
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.place import RankPlace

HOST, OWN = "127.0.0.1", b"o" * 32
TWO = MeshSpec.parse("tp=2")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the filter is one of Linux")


def both(work: Callable[[int], Any]) -> list[Any]:
    """What each of two ranks returns, or raises; they are threads."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def at_a_file(folder: Path, seconds: float = 30.0) -> Meeting:
    return Meeting(seconds, b"k" * KEY, file=str(folder / "store"))


def reachable(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 0.2).close()
    except OSError:
        return False
    return True


def added(first: Ranks, second: Ranks) -> list[Any]:
    return both(lambda rank: (first, second)[rank].world.all_reduce(torch.full((3,), 1.0 + rank)).tolist())


@linux
def test_ranks_that_have_met_are_reached_by_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doors: list[tuple[str, int]] = []
    close = GlooDevice.close_door

    def watched(self: GlooDevice) -> None:
        doors.extend(one.getsockname() for one in self._listening)
        close(self)

    monkeypatch.setattr(GlooDevice, "close_door", watched)
    first, second = both(lambda rank: join(RankPlace(TWO, rank), at_a_file(tmp_path), HOST, "cpu"))
    assert len(doors) == 2, "one for each rank, whatever the number of its groups"
    assert not any(reachable(address) for address in doors)
    assert added(first, second) == [[3.0] * 3] * 2


@linux
def test_the_store_of_ranks_on_several_machines_is_closed_when_they_have_met() -> None:
    with socket.create_server((HOST, 0)) as listening:
        address = listening.getsockname()
        meeting = Meeting(30.0, b"k" * KEY, host=HOST, port=address[1])
        found = both(lambda rank: join(RankPlace(TWO, rank), meeting, HOST, "cpu", OWN, None if rank else listening))
        assert added(*found) == [[3.0] * 3] * 2
        assert not reachable(address)


def test_a_value_that_no_rank_has_written_ends_the_meeting() -> None:
    """Anybody may write to the store while ranks meet."""
    with socket.create_server((HOST, 0)) as listening:
        meeting = Meeting(5.0, b"k" * KEY, host=HOST, port=listening.getsockname()[1])
        wait = timedelta(seconds=5)
        shared = dist.TCPStore(HOST, meeting.port, 2, True, wait, False, master_listen_fd=listening.dup().detach())
        store = SealedStore(shared, meeting.secret(OWN))
        store.set("true", b"value")
        assert store.get("true") == b"value"
        stranger = dist.TCPStore(HOST, meeting.port, 2, False, wait, False)
        moved = stranger.get("true")
        stranger.set("other", moved)
        stranger.set("true", b"address of a stranger".ljust(64))
        for key in ("true", "other"):
            with pytest.raises(RuntimeError, match="is not of a rank"):
                store.get(key)
        assert meeting.secret(b"x" * 32) != meeting.secret(OWN) not in shared.get("other")


def test_a_process_that_is_no_rank_does_not_take_part(tmp_path: Path) -> None:
    """It has reached a socket of Gloo before the true rank, and knows all but the key."""

    def meet(rank: int) -> None:
        own = Meeting(10.0, bytes([rank]) * KEY, file=str(tmp_path / "store"))
        join(RankPlace(TWO, rank), own, HOST, "cpu")

    for problem in both(meet):
        assert isinstance(problem, RankLost) and "a process that is no rank" in str(problem)


def test_each_member_proves_itself_to_each_other_one() -> None:
    class Alone:
        def alltoall_base(self, found: torch.Tensor, sent: torch.Tensor, *sizes: object) -> Any:
            found.copy_(sent)
            return self

        def wait(self) -> None:
            pass

    prove_members(Alone(), "world", [3], 3, OWN)
    with pytest.raises(RuntimeError, match="no rank has joined the group world"):
        prove_members(Alone(), "world", [2, 3], 3, OWN)  # its own proofs come back


@linux
def test_a_socket_that_is_deaf_keeps_its_connections() -> None:
    with socket.create_server((HOST, 0)) as listening:
        with socket.create_connection(listening.getsockname()) as caller:
            connection, _ = listening.accept()
            deafen(listening)
            with connection:
                caller.sendall(b"still here")
                assert connection.recv(10) == b"still here"
        assert not reachable(listening.getsockname())
