"""Models that ranks of a mesh build, each its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.shard import Shard
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.models.oracle import CPU, PASSES, TOKENS
from tests.parallel.threads import ThreadRank


def expert_ranks(rank: ThreadRank, mesh: MeshSpec | None) -> ExpertRanks:
    """The groups of a rank; None: all ranks hold different experts and run the same tokens."""
    if mesh is None:
        return ExpertRanks(rank, rank)
    places = mesh.expert_places(rank.index)
    tokens, width = (rank.among(*ranks) if len(ranks) > 1 else None for ranks in (places.tokens, places.width))
    return ExpertRanks(rank.among(*places.group), tokens, width)


def build_of(rank: ThreadRank, path: Path, mesh: MeshSpec | None, **how: Any) -> Build:
    kit = kit_for("cpu", how.pop("providers", "torch"))
    shard = None if mesh is None else Shard(rank)
    experts = how.pop("experts", None) or expert_ranks(rank, mesh)
    return Build(open_model(path).source, kit, torch.float32, CPU, shard=shard, experts=experts, **how)


def model_of(rank: ThreadRank, path: Path, mesh: MeshSpec | None, **how: Any) -> Decoder:
    return build_model(open_model(path).config, build_of(rank, path, mesh, **how))


def logits_of(model: Decoder, cut: str = "chunks", tokens: list[int] = TOKENS) -> Tensor:
    return naive.logits(model, tokens, CPU, PASSES[cut])
