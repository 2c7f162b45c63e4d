"""Groups of processes that exchange tensors: torch.distributed's process groups, without its global state, so that
several models of one program do not meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bankfull.layers.apart import SideBuild
from bankfull.layers.build import Build
from bankfull.layers.expert_ranks import ExpertRanks
from bankfull.layers.shard import Shard
from bankfull.layers.stage import Stage
from bankfull.mesh import MeshSpec
from bankfull.ops import Sides
from bankfull.parallel.hot import HotExperts, bytes_of_copies
from bankfull.runtime.device import Device

SECONDS = 60.0
"""The longest wait of a rank for the others, in a collective and at the start."""


class RankLost(RuntimeError):
    """Another rank has ended, or does not answer: this replica cannot go on."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in the mesh: tensor ranks are innermost, then context ranks, then ranks of feed-forward layers,
    then stages."""

    mesh: MeshSpec
    rank: int

    @property
    def stage(self) -> int:
        return self.rank // self.mesh.stage_ranks

    @property
    def feeds(self) -> bool:
        """Whether this rank runs only feed-forward layers."""
        return self.rank % self.mesh.stage_ranks >= self.mesh.tp * self.mesh.cp

    def stage_ranks(self) -> list[int]:
        first = self.stage * self.mesh.stage_ranks
        return list(range(first, first + self.mesh.stage_ranks))

    def tensor_ranks(self) -> list[int]:
        """The ranks that split the same layers by heads and widths."""
        mesh, own = self.mesh, self.stage_ranks()
        if self.feeds:
            return own[mesh.tp * mesh.cp :]
        first = (self.rank - own[0]) // mesh.tp * mesh.tp
        return own[first : first + mesh.tp]


class ProcessRanks:
    """A `RankGroup` of processes."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, device: str) -> None:
        self.group, self.device = group, device
        self.size, self.index = len(ranks), ranks.index(rank)
        self.sent = 0
        """Bytes that this rank has sent, by the algorithms of `ops.reference.collectives`."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self._count(x, 2)
        total = x.contiguous().clone()
        self.wait(self.group.allreduce([total]))
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        self._count(x, self.size)
        found = x.new_empty(self.size, *x.shape)
        self.wait(self.group.allgather([list(found.unbind(0))], [x.contiguous()]))
        return found

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """As an all-reduce whose other parts are dropped: Gloo reduces and scatters in no other way."""
        self._count(x, 2)
        total = x.contiguous().clone()
        self.wait(self.group.allreduce([total]))
        return total.chunk(self.size)[self.index]

    def all_to_all(self, x: Tensor) -> Tensor:
        self._count(x, 1)
        found = torch.empty_like(x)
        self.wait(self.group.alltoall_base(found, x.contiguous(), [], []))
        return found

    def exchange(self, parts: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Part i goes to rank i; the parts that came here, which have so many `rows`."""
        own = parts[self.index]
        self.sent += sum(part.numel() * part.element_size() for part in parts) - own.numel() * own.element_size()
        found = own.new_empty(sum(rows), *own.shape[1:])
        sizes = [len(part) for part in parts]
        self.wait(self.group.alltoall_base(found, torch.cat(list(parts)), list(rows), sizes))
        return list(found.split(list(rows)))

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks."""
        found = self.all_gather(torch.tensor(numbers, dtype=torch.int64))
        return [int(number) for number in found.amin(0)]

    def wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise RankLost(f"a rank has ended, or did not answer within {SECONDS:g} s ({_first(error)}).") from error

    def _count(self, x: Tensor, passes: float) -> None:
        self.sent += int(passes * x.numel() * x.element_size() * (self.size - 1) / self.size)


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0][:160].rstrip(". ")


class ProcessNeighbour:
    """The same tensor rank of the stage before or after."""

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
    sides: Sides | None = None
    """Set where feed-forward layers have ranks of their own."""

    keeping: ProcessRanks | None = None
    """The ranks that keep state of sequences, which are all but those of feed-forward layers; None: only this one."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks that keep state: of pages, for example."""
        return list(numbers) if self.keeping is None else self.keeping.least(numbers)

    def build(self, whole: Build, layers: int) -> Build:
        """This rank's part of a model with so many layers."""
        shard = None if self.tensor is None else Shard(self.tensor)
        own = replace(whole, shard=shard, experts=self.experts, stage=self.stage(layers))
        return own if self.sides is None else SideBuild.of(own, self.sides)

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

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses tokens: the last stage does."""
        return self.place.stage == self.place.mesh.pp - 1

    @property
    def tells(self) -> bool:
        """Whether this rank tells rank 0 which tokens were chosen."""
        return self.place.mesh.pp > 1 and self.chooses and self.place.rank % self.place.mesh.stage_ranks == 0


def join(place: RankPlace, host: str, port: int, device: str) -> Ranks:
    """Meet the other ranks at the store that rank 0 keeps, and form the groups of the mesh."""
    mesh, wait = place.mesh, timedelta(seconds=SECONDS)
    try:
        store = dist.TCPStore(host, port, mesh.ranks, place.rank == 0, wait, wait_for_workers=False)
        world = _group(store, "world", list(range(mesh.ranks)), place.rank, host, device)
        tensor = None
        if len(ranks := place.tensor_ranks()) > 1:
            tensor = _group(store, f"tensor-{ranks[0]}", ranks, place.rank, host, device)
        sides: Sides | None = None
        keeping: ProcessRanks | None = world
        if mesh.ffn:
            holders = [rank for rank in range(mesh.ranks) if not RankPlace(mesh, rank).feeds]
            apart = place.feeds or len(holders) == 1
            keeping = None if apart else _group(store, "keeping", holders, place.rank, host, device)
            name = f"sides-{place.stage}"
            sides = Sides(_group(store, name, place.stage_ranks(), place.rank, host, device), mesh.tp)
        experts = None
        if mesh.ep > 1 and (place.feeds or not mesh.ffn):
            at = mesh.expert_places(place.rank)
            spread, same, width = (
                None if len(ranks) < 2 else _group(store, f"{name}-{ranks[0]}", list(ranks), place.rank, host, device)
                for name, ranks in (("experts", at.group), ("tokens", at.tokens), ("width", at.width))
            )
            assert spread is not None, "experts are spread over several ranks"
            experts = ExpertRanks(spread, same, width)
    except RuntimeError as error:
        raise RankLost(f"the ranks of {mesh} did not meet within {SECONDS:g} s ({_first(error)}).") from error
    return Ranks(place, world, tensor, experts, sides, keeping)


def _group(store: Any, name: str, ranks: list[int], rank: int, host: str, device: str) -> ProcessRanks:
    own, index = dist.PrefixStore(name, store), ranks.index(rank)
    if device == "cuda":
        patient = dist.ProcessGroupNCCL.Options()
        patient._timeout = timedelta(seconds=SECONDS)
        made: Any = dist.ProcessGroupNCCL(own, index, len(ranks), patient)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=SECONDS)
        made = gloo(own, index, len(ranks), options)
    return ProcessRanks(made, ranks, rank, device)
