"""Attention and feed-forward apart: mixers on some ranks, feed-forward layers on others, the logits of the whole."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model, rank_config
from bankfull.ops import Sides, Unnormed, cross, kit_for
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.shard import Shard
from bankfull.spread.apart import Feeds, OneSide, RemoteFeed, with_remote_feeds
from bankfull.weights.source import open_model
from tests.models.cases import CASES
from tests.models.oracle import CPU, PASSES, TOLERANCE
from tests.parallel.built import logits_of
from tests.parallel.even import even_model
from tests.parallel.test_tensor import APART
from tests.parallel.threads import Meeting, ThreadRank, on_ranks

HIDDEN = 48
CUT = PASSES["chunks"]


def side_of(rank: ThreadRank, name: str, mesh: MeshSpec, providers: str = "torch") -> tuple[Build, Decoder, Sides]:
    """What a rank of the mesh builds."""
    files, sides = open_model(even_model(name)[0]), Sides(rank, mesh.tp)
    ranks = range(mesh.tp) if sides.runs_mixers else range(mesh.tp, rank.size)
    experts = None
    if mesh.ep > 1 and not sides.runs_mixers:
        places = mesh.expert_places(rank.index)
        width = rank.among(*places.width) if len(places.width) > 1 else None
        experts = ExpertRanks(rank.among(*places.group), rank.among(*places.tokens), width)
    shard = Shard(rank.among(*ranks)) if len(ranks) > 1 else None
    whole = Build(files.source, kit_for("cpu", providers), torch.float32, CPU, shard=shard, experts=experts)
    build = whole.placed(OneSide.of(sides))
    return whole, build_model(files.config, build), sides


def run(rank: ThreadRank, name: str, mesh: MeshSpec, providers: str = "torch") -> Tensor | None:
    build, model, sides = side_of(rank, name, mesh, providers)
    if sides.runs_mixers:
        return logits_of(with_remote_feeds(build, model, sides))
    feeds = Feeds(build, model, sides)
    for tokens in CUT:
        feeds.run(tokens)
    return None


def worst(name: str, mesh: MeshSpec, providers: str = "torch") -> float:
    expected = even_model(name)[1]
    found = on_ranks(mesh.ranks, lambda rank: run(rank, name, mesh, providers))
    return max(float((one - expected).abs().max()) for one in found[: mesh.tp] if one is not None)


@pytest.mark.few(24)
@pytest.mark.parametrize("name", [name for name in CASES if name not in APART])
def test_one_rank_runs_mixers_and_one_feeds_in_every_family(name: str) -> None:
    assert worst(name, MeshSpec(ffn=1)) < TOLERANCE


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["tp=2,ffn=2", "tp=2,ffn=2,ep=2", "tp=2,ffn=1", "ffn=3,ep=3"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "deepseek-v3", "granitemoehybrid"])
def test_both_sides_have_as_many_ranks_as_they_need(name: str, layout: str) -> None:
    assert worst(name, MeshSpec.parse(layout)) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "opt", "gemma2", "phi3"])
def test_dense_layers_are_split_over_two_ranks_of_their_own(name: str) -> None:
    assert worst(name, MeshSpec(tp=2, ffn=2)) < TOLERANCE


def test_native_kernels_run_both_sides() -> None:
    assert worst("llama", MeshSpec(ffn=1), "auto") < TOLERANCE


class Norming:
    """A feed-forward layer that norms its rows itself."""

    def norms(self, rows: int) -> bool:
        return True

    def __call__(self, x: Unnormed) -> Tensor:
        raise AssertionError("its rows cross")


def test_rows_cross_normed_also_where_the_layer_would_norm_them_itself() -> None:
    files = open_model(even_model("llama")[0])
    build = Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU)
    model = build_model(files.config, build)
    model.blocks = [replace(block, feed=Norming()) for block in model.blocks]
    remote = with_remote_feeds(build, model, Sides(ThreadRank(Meeting(1), 1, 0), 1))
    x = torch.randn(3, HIDDEN)
    for block in remote.blocks:
        assert block.before_feed is not None
        assert isinstance(block.before_feed.join(x, x)[1], Tensor)


@pytest.mark.parametrize("name", ["llama", "mixtral", "jamba", "granitemoehybrid", "opt", "gpt2"])
def test_a_side_reads_only_its_own_weights(name: str) -> None:
    path = even_model(name)[0]

    def read(rank: ThreadRank) -> set[str]:
        build, _, _ = side_of(rank, name, MeshSpec(ffn=1))
        return set(build.source.names()) - set(build.source.unread())

    mixers, feeds = on_ranks(2, read)
    assert not mixers & feeds
    sizes = {one: prod(open_model(path).source.shape(one)) for one in mixers | feeds}
    assert sum(sizes[one] for one in feeds) > 0.2 * sum(sizes.values())
    assert {one for one in open_model(path).source.names() if one not in sizes} <= {"lm_head.weight"}


@pytest.mark.parametrize(("mixers", "feeds"), [(1, 1), (2, 2), (2, 3)])
def test_hidden_states_cross_twice_per_layer_and_no_more(mixers: int, feeds: int) -> None:
    """Every rank of a side gets all rows, and each sender sends its share of them."""
    tokens = 7

    def work(rank: ThreadRank) -> tuple[list[int], float]:
        sides = Sides(rank, mixers)
        x = torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN)
        if sides.runs_mixers:
            build = Build(open_model(even_model("llama")[0]).source, kit_for("cpu", "torch"), torch.float32, CPU)
            assert torch.equal(RemoteFeed(build, sides)(x), 2 * x)
        else:
            found = cross(x[:0], tokens, sides, True)
            assert torch.equal(found, x)
            cross(2 * found, tokens, sides, False)
        return rank.sent, sum(cross.cost(x, tokens, sides, way).wire for way in (True, False))

    row = 4 * HIDDEN
    found = on_ranks(mixers + feeds, work)
    assert sum(sum(sent) for sent, _ in found) == tokens * row * (feeds + mixers)
    for sent, declared in found:
        assert sum(sent) == declared
    most = -(-tokens // mixers) * feeds * row
    assert max(sum(sent) for sent, _ in found[:mixers]) == most


@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_fewer_tokens_than_ranks_cross_too(tokens: int) -> None:
    def work(rank: ThreadRank) -> None:
        sides, x = Sides(rank, 3), torch.randn(tokens, 4, generator=torch.Generator().manual_seed(1))
        found = cross(x if sides.runs_mixers else x[:0], tokens, sides, True)
        assert torch.equal(found, x[:0] if sides.runs_mixers else x)

    on_ranks(5, work)


def test_a_width_that_ranks_cannot_share_is_refused_by_the_name_of_their_axis() -> None:
    config = open_model(even_model("llama")[0]).config
    with pytest.raises(ConfigError, match=r"intermediate_size of \d+ cannot be split evenly over 5 ranks; .* ffn"):
        rank_config(config, 1, 5, False)
