"""Tensor ranks: each builds its part of a model; together they compute what the whole model computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import pytest
import torch
from torch import Tensor

from bankfull.axes import Axes
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ranks.shard import Shard
from bankfull.runtime import naive
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import open_model
from tests.models.cases import CASES
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE
from tests.parallel.even import even_model
from tests.parallel.threads import ThreadRank, on_ranks

APART = ("gemma3", "gemma3-untied", "hunyuan-shared", "hunyuan-shared-biased")
"""Cases whose configuration cannot be changed from outside."""


def logits_of_rank(rank: ThreadRank, name: str, cut: str) -> Tensor:
    files = open_model(even_model(name)[0])
    build = Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU, shard=Shard(rank))
    return naive.logits(build_model(files.config, build), TOKENS, CPU, PASSES[cut])


@pytest.mark.few(24)
@pytest.mark.parametrize("name", [name for name in CASES if name not in APART])
def test_two_ranks_compute_the_logits_of_the_reference(name: str) -> None:
    expected = even_model(name)[1]
    for found in on_ranks(2, lambda rank: logits_of_rank(rank, name, "chunks")):
        assert float((found - expected).abs().max()) < TOLERANCE


def test_heads_of_keys_are_copied_where_ranks_outnumber_them() -> None:
    expected = even_model("llama")[1]
    for found in on_ranks(6, lambda rank: logits_of_rank(rank, "llama", "chunks")):  # 2 heads of keys and values
        assert float((found - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek-v3", "mamba2", "jamba", "qwen3-next", "minimax"])
def test_ranks_hold_parts_of_the_weights(name: str) -> None:
    """What no rank can split (norms, routers, latents) is little: two ranks hold well below two models."""

    def held(rank: ThreadRank) -> int:
        files = open_model(even_model(name)[0])
        build = CountingBuild(files.source, kit_for("cpu", "torch"), torch.float32, CPU, shard=Shard(rank))
        build_model(files.config, build)
        return sum(build.sizes.values())

    source = open_model(even_model(name)[0]).source
    whole = sum(prod(source.shape(one)) for one in source.names())
    first, second = on_ranks(2, held)
    assert first + second < 1.35 * whole


@dataclass(frozen=True, slots=True)
class CountingBuild(Build):
    """Counts the numbers that a model's layers get."""

    sizes: dict[str, int] = field(default_factory=dict)

    def _find(self, name: str, axes: Axes) -> QTensor:
        found = Build._find(self, name, axes)
        self.sizes[self._full(name)] = prod(found.shape)
        return found
