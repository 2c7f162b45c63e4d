"""A rank's place in the mesh, and the ranks that it works with."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.ranks.mesh import MeshSpec


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
        mesh, ranks = self.mesh, self.stage_ranks()
        if self.feeds:
            return ranks[mesh.tp * mesh.cp :]
        first = (self.rank - ranks[0]) // mesh.tp * mesh.tp
        return ranks[first : first + mesh.tp]

    def context_ranks(self) -> list[int]:
        """The ranks that divide the tokens of the same layers."""
        mesh, ranks = self.mesh, self.stage_ranks()
        return ranks[(self.rank - ranks[0]) % mesh.tp : mesh.tp * mesh.cp : mesh.tp]
