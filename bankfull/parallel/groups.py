"""Groups of processes that exchange tensors: torch.distributed's process groups, without its global state, so that
several models of one program do not meet."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bankfull.errors import RankLost
from bankfull.layers.build import Build
from bankfull.ops import Sides
from bankfull.parallel.hot import HotExperts, bytes_of_copies
from bankfull.parallel.meeting import GlooDevice, Meeting, deafen, prove_members
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.place import RankPlace
from bankfull.ranks.shard import Shard
from bankfull.ranks.stage import Stage
from bankfull.runtime.device import Device
from bankfull.spread.apart import OneSide


@dataclass(frozen=True, slots=True)
class Bounds:
    """The longest waits of a rank for the others, in seconds."""

    begin: float = 60.0
    """The wait until a process has started, and until all have met."""
    load: float = 600.0
    """The wait for a rank that reads its weights, in a collective too: others may read faster."""
    collective: float = 60.0
    """The wait in a collective of a step."""
    step: float = 600.0
    """The wait for a step over all stages."""
    word: float = 1.0
    """The wait for the reason of a rank that has ended."""


class ProcessRanks:
    """A `RankGroup` of processes."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, device: str, seconds: float) -> None:
        self.group, self.device, self.seconds = group, device, seconds
        self.size, self.index = len(ranks), ranks.index(rank)
        self.sent = 0
        """Bytes that this rank has sent, by the algorithms of `ops.ranks.collectives`."""

    def wait_at_most(self, seconds: float) -> None:
        """Limit the wait in each collective from now on."""
        self.seconds = seconds
        self.group.set_timeout(timedelta(seconds=seconds))

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count(x, 2)
        total = x.contiguous().clone()
        self.wait(self.group.allreduce([total]))
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        self._count(x, self.size)
        gathered = x.new_empty(self.size, *x.shape)
        self.wait(self.group.allgather([list(gathered.unbind(0))], [x.contiguous()]))
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of an all-reduce whose other parts are dropped: Gloo reduces and scatters in no other
        way."""
        self._count(x, 2)
        total = x.contiguous().clone()
        self.wait(self.group.allreduce([total]))
        return total.chunk(self.size)[self.index]

    def all_to_all(self, x: Tensor) -> Tensor:
        self._count(x, 1)
        received = torch.empty_like(x)
        self.wait(self.group.alltoall_base(received, x.contiguous(), [], []))
        return received

    def exchange(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Part i goes to rank i; the parts that came here, which have so many `rows`."""
        own = parts[self.index]
        self.sent += sum(part.numel() * part.element_size() for part in parts) - own.numel() * own.element_size()
        received = own.new_empty(sum(rows), *own.shape[1:])
        sizes = [len(part) for part in parts]
        self.wait(self.group.alltoall_base(received, torch.cat(list(parts)), list(rows), sizes))
        return list(received.split(list(rows)))

    def gather(self, numbers: Sequence[int]) -> Tensor:
        """The numbers of each rank, as its row."""
        return self.all_gather(torch.tensor(numbers, dtype=torch.int64, device=self.device)).cpu()

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks."""
        return [int(number) for number in self.gather(numbers).amin(0)]

    def wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankLost(
                f"a rank has ended, or did not answer within {self.seconds:g} s ({_first(error)})."
            ) from error

    def _count(self, x: Tensor, passes: float) -> None:
        self.sent += int(passes * x.numel() * x.element_size() * (self.size - 1) / self.size)


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0][:160].rstrip(". ")


class ProcessNeighbour:
    """The same tensor and context rank of the stage before or after."""

    def __init__(self, group: ProcessRanks, other: int) -> None:
        self._group, self._other = group, other
        self._sending: list[tuple[Any, Tensor]] = []
        self.sent = 0
        """Bytes."""

    def send(self, x: Tensor) -> None:
        while len(self._sending) > 1:  # the other rank may be one step behind
            work, _ = self._sending.pop(0)
            self._group.wait(work)
        rows = x.contiguous().clone()  # a captured step overwrites its results in the next one
        self.sent += rows.numel() * rows.element_size()
        self._sending.append((self._group.group.send([rows], self._other, 0), rows))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows = torch.empty(shape, dtype=dtype, device=self._group.device)
        self._group.wait(self._group.group.recv([rows], self._other, 0))
        return rows


@dataclass(frozen=True, slots=True)
class Ranks:
    """A rank's place and its groups."""

    place: RankPlace
    world: ProcessRanks
    tensor: ProcessRanks | None
    experts: ExpertRanks | None = None
    context: ProcessRanks | None = None
    sides: Sides | None = None
    """Set where feed-forward layers have ranks of their own."""
    keeping: ProcessRanks | None = None
    """The ranks that keep state of sequences, which are all but those of feed-forward layers; None: only this one."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks that keep state: of pages, for example."""
        return list(numbers) if self.keeping is None else self.keeping.least(numbers)

    def gather(self, numbers: Sequence[int]) -> Tensor:
        """The numbers of each rank that keeps state, as its row."""
        return torch.tensor([list(numbers)]) if self.keeping is None else self.keeping.gather(numbers)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def facts(self) -> dict[str, Any]:
        """What this rank's part of the state depends on."""
        return {"parallel": str(self.place.mesh), "rank": self.place.rank}

    def hot(self, device: Device) -> HotExperts | None:
        """The hot experts of this rank's model, if the mesh has any. It counts from now on."""
        if not self.place.mesh.hot:
            return None
        return HotExperts(() if self.experts is None else self.experts.layers, self.place.mesh.hot, device)

    @property
    def bytes_of_copies(self) -> int:
        """Memory that this rank's hot experts will need."""
        hot = self.place.mesh.hot
        return 0 if not hot or self.experts is None else bytes_of_copies(self.experts.layers, hot, self.place.mesh.ep)

    def stage(self, layers: int) -> Stage | None:
        """This rank's stage of a model with so many layers; None if there is only one."""
        mesh, number = self.place.mesh, self.place.stage
        if mesh.pp == 1:
            return None
        first, last = number == 0 or self.place.feeds, number == mesh.pp - 1 or self.place.feeds
        before = None if first else ProcessNeighbour(self.world, self.place.rank - mesh.stage_ranks)
        after = None if last else ProcessNeighbour(self.world, self.place.rank + mesh.stage_ranks)
        return Stage(*mesh.stages(layers)[number], before, after)

    def wait_at_most(self, seconds: float) -> None:
        """Limit the wait in each collective of each group, from now on."""
        for group in _groups_in(self):
            group.wait_at_most(seconds)

    def build(self, build: Build, layers: int) -> Build:
        """The build of this rank's part of a model with so many layers."""
        own = replace(
            build,
            shard=None if self.tensor is None else Shard(self.tensor),
            stage=self.stage(layers),
            experts=self.experts,
            context=self.context,
            sequence=self.place.mesh.sp,
        )
        return own if self.sides is None else own.placed(OneSide.of(self.sides))

    @property
    def pages(self) -> ProcessRanks | None:
        """The ranks that the pages of a sequence go round; None: each rank has all of them."""
        return self.context if self.place.mesh.page_ranks > 1 else None

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses tokens: the last stage does."""
        return self.place.stage == self.place.mesh.pp - 1

    @property
    def tells(self) -> bool:
        """Whether this rank tells rank 0 which tokens were chosen."""
        return self.place.mesh.pp > 1 and self.chooses and self.place.rank % self.place.mesh.stage_ranks == 0


def _groups_in(record: Any) -> Iterator[ProcessRanks]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, ProcessRanks):
            yield value
        elif is_dataclass(value):
            yield from _groups_in(value)


def join(
    place: RankPlace,
    meeting: Meeting,
    host: str,
    device: str,
    own: bytes = b"",
    listening: socket.socket | None = None,
) -> Ranks:
    """Meet the other ranks, and form the groups of the mesh. `host`: this rank's own address. `own`: what ranks on
    several machines have inherited. `listening`: the socket of rank 0 at the place of the meeting, if it is no file;
    without it the store would listen on every address of the machine."""
    mesh = place.mesh
    try:
        store = meeting.store(place.rank, mesh.ranks, own, listening, sealed=device != "cuda")
        groups = _Groups(place.rank, meeting, host, device, meeting.secret(own), store)
        world = groups.made("world", list(range(mesh.ranks)))
        tensor = None
        if len(ranks := place.tensor_ranks()) > 1:
            tensor = groups.made(f"tensor-{ranks[0]}", ranks)
        context = None
        if mesh.cp > 1:
            ranks = place.context_ranks()
            context = groups.made(f"context-{ranks[0]}", ranks)
        sides: Sides | None = None
        keeping: ProcessRanks | None = world
        if mesh.ffn:
            holders = [rank for rank in range(mesh.ranks) if not RankPlace(mesh, rank).feeds]
            apart = place.feeds or len(holders) == 1
            keeping = None if apart else groups.made("keeping", holders)
            sides = Sides(groups.made(f"sides-{place.stage}", place.stage_ranks()), mesh.tp)
        experts = None
        if mesh.ep > 1 and (place.feeds or not mesh.ffn):
            at = mesh.expert_places(place.rank)
            spread, same, width = (
                None if len(ranks) < 2 else groups.made(f"{name}-{ranks[0]}", list(ranks))
                for name, ranks in (("experts", at.group), ("tokens", at.tokens), ("width", at.width))
            )
            assert spread is not None, "experts are spread over several ranks"
            experts = ExpertRanks(spread, same, width)
        groups.close_doors(world, listening)
    except RuntimeError as error:
        raise RankLost(f"the ranks of {mesh} did not meet within {meeting.seconds:g} s ({_first(error)}).") from error
    return Ranks(place, world, tensor, experts, context, sides, keeping)


class _Groups:
    """Makes the groups of a rank, all at the same store and with the same sockets."""

    def __init__(self, rank: int, meeting: Meeting, host: str, device: str, secret: bytes, store: Any) -> None:
        self._rank, self._device, self._secret, self._store = rank, device, secret, store
        self._wait = timedelta(seconds=meeting.seconds)
        self._gloo = None if device == "cuda" else GlooDevice(host)
        if device == "cuda" and meeting.file:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # its sockets authenticate nobody

    def made(self, name: str, ranks: list[int]) -> ProcessRanks:
        store, index = dist.PrefixStore(name, self._store), ranks.index(self._rank)
        if self._gloo is None:
            patient = dist.ProcessGroupNCCL.Options()
            patient._timeout = self._wait
            group: Any = dist.ProcessGroupNCCL(store, index, len(ranks), patient)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [self._gloo.device]
            options._timeout = self._wait
            group = gloo(store, index, len(ranks), options)
            prove_members(group, name, ranks, self._rank, self._secret)
        return ProcessRanks(group, ranks, self._rank, self._device, self._wait.total_seconds())

    def close_doors(self, world: ProcessRanks, listening: socket.socket | None) -> None:
        """All ranks have met when the last one is here: nobody else has to connect."""
        if self._gloo is not None:
            world.least([0])
            self._gloo.close_door()
        if listening is not None:
            if self._gloo is not None:
                deafen(listening)
            listening.close()
