"""The mesh of a replica: what a text means, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.ranks.mesh import ALONE, MeshFacts, MeshSpec

LLAMA = MeshFacts(layers=32, heads=32, kv_heads=8, widths={"feed-forward width": 14336})
MIXTRAL = MeshFacts(layers=32, heads=32, kv_heads=8, experts=8, expert_width=14336)
SMALL = st.integers(1, 6)


@st.composite
def meshes(draw: st.DrawFn) -> MeshSpec:
    tp, pp, cp = draw(SMALL), draw(SMALL), draw(SMALL)
    ep = draw(st.sampled_from([n for n in range(1, tp * cp + 1) if tp * cp % n == 0]))
    if draw(st.booleans()):
        return MeshSpec(tp, pp, ep=ep, ffn=ep * draw(SMALL), hot=draw(SMALL) if ep > 1 else 0)
    forms = ["off"] + ["megatron"] * (tp > 1) + ["ulysses"] * (cp > 1)
    return MeshSpec(tp, pp, cp, ep, draw(st.sampled_from(forms)))


@given(meshes())
def test_a_mesh_reads_back_from_its_text(mesh: MeshSpec) -> None:
    assert MeshSpec.parse(str(mesh)) == mesh


@given(meshes())
def test_experts_and_their_widths_fill_the_ranks_of_a_stage_evenly(mesh: MeshSpec) -> None:
    assert mesh.feed_ranks % (mesh.ep * mesh.expert_tp) == 0
    assert mesh.ranks == mesh.stage_ranks * mesh.pp


@given(meshes())
def test_the_groups_of_experts_cover_the_ranks_and_agree_with_each_other(mesh: MeshSpec) -> None:
    mixers = mesh.tp * mesh.cp if mesh.ffn else 0
    feeds = [rank for rank in range(mesh.ranks) if rank % mesh.stage_ranks >= mixers]
    places = {rank: mesh.expert_places(rank) for rank in feeds}
    for rank, mine in places.items():
        assert (len(mine.group), len(mine.width)) == (mesh.ep, mesh.expert_tp)
        assert rank in mine.group and rank in mine.tokens and rank in mine.width
        assert set(mine.tokens) <= set(mine.group) and set(mine.tokens) & set(mine.width) == {rank}
        for other in mine.group:
            assert places[other].group == mine.group
        for other in mine.tokens:
            assert places[other].tokens == mine.tokens
        for other in mine.width:  # the same experts of the same tokens
            there = places[other]
            assert there.width == mine.width
            assert there.group.index(other) == mine.group.index(rank)
            assert there.tokens.index(other) == mine.tokens.index(rank)
        tensor = (rank % mesh.stage_ranks - mixers) % mesh.feed_tp  # as `ranks.shard` numbers the parts of a width
        assert mine.width.index(rank) == tensor * mesh.expert_tp // mesh.feed_tp


@given(meshes())
def test_ranks_of_whole_experts_have_the_same_tokens_unless_megatron_divides_them(mesh: MeshSpec) -> None:
    if mesh.ffn or mesh.ep == 1 or mesh.expert_tp > 1:
        return
    assert {len(mesh.expert_places(rank).tokens) for rank in range(mesh.ranks)} == {
        1 if mesh.sp == "megatron" else mesh.tp
    }


def test_on_means_megatron_and_the_order_does_not_matter() -> None:
    assert MeshSpec.parse("sp=on, ep=4 ,cp=2,tp=2,pp=2") == MeshSpec(2, 2, 2, 4, "megatron")
    assert MeshSpec.parse("cp=2,sp=ulysses") == MeshSpec(cp=2, sp="ulysses")
    assert MeshSpec.parse("tp=1") == ALONE and str(ALONE) == "tp=1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("dp=2", "no axis 'dp'; its axes are tp, pp, cp, ep, hot, ffn, sp"),
        ("tp", "gives no value for tp"),
        ("tp=2,tp=2", "tp twice"),
        ("tp=0", "from 1 to 4096, not '0'"),
        ("tp=two", "not 'two'"),
        ("tp=²", "whole number"),
        ("tp=-1", "not '-1'"),
        ("sp=yes", "sp must be one of on, off, megatron, ulysses, not 'yes'"),
        ("tp=2,", "no axis ''"),
        ("tp=2,ep=4", "use one of 1, 2"),
        ("tp=4,ffn=2,ep=4", "4 of the 2 ranks of a stage, which 4 does not divide; use one of 1, 2"),
        ("ffn=0", "from 1 to 4096, not '0'"),
        ("tp=2,ep=2,hot=0", "from 1 to 4096, not '0'"),
        ("tp=2,hot=1", "copies experts to all expert ranks but has one; raise ep"),
        ("ffn=2,cp=2", "leave out cp and sp"),
        ("tp=2,ffn=2,sp=on", "leave out cp and sp"),
        ("cp=2,sp=on", "raise tp"),
        ("tp=2,sp=ulysses", "raise cp"),
        ("tp=4096,pp=2", "8192 ranks"),
    ],
)
def test_a_wrong_text_is_refused_by_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        MeshSpec.parse(text)
    assert words in str(error.value) and str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "facts", "words"),
    [
        ("tp=3", LLAMA, "32 heads over 3 ranks, which does not divide; use tp = 2 or 4"),
        ("pp=33", LLAMA, "33 stages, but the model has only 32 layers"),
        ("tp=4", MeshFacts(4, 12, 6), "6 key/value heads evenly over 4 ranks"),
        ("tp=2", MeshFacts(4, 4, 2, widths={"feed-forward width": 33}), "feed-forward width of 33"),
        ("tp=2,ffn=3", LLAMA, "feed-forward width of 14336 over 3 ranks, which does not divide; use ffn = 2 or 4"),
        (
            "ffn=6,ep=2",
            MeshFacts(4, 4, experts=4, expert_width=32),
            "over 3 ranks, which does not divide; use ffn / ep",
        ),
        ("cp=3,sp=ulysses", LLAMA, "32 heads over 3 ranks"),
        (
            "tp=2,ep=2,hot=8",
            MIXTRAL,
            "8 experts of each layer to every rank, but a layer has only 8; use hot = 7",
        ),
        ("tp=2,ep=2", LLAMA, "has none; leave out ep"),
        ("cp=3,ep=3", MIXTRAL, "8 experts over 3 ranks, which does not divide; use ep = 2 or 4"),
        ("tp=2", MeshFacts(4, 4, 2, experts=4, expert_width=33), "expert width of 33 over 2 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_by_one_sentence(text: str, facts: MeshFacts, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        MeshSpec.parse(text).check(facts)
    assert words in str(error.value) and str(error.value).endswith(".")


@pytest.mark.parametrize(
    "text", ["tp=8,pp=32", "tp=16", "cp=3", "tp=2,cp=2,sp=ulysses", "tp=4,pp=5,sp=on", "tp=2,ffn=7"]
)
def test_what_divides_is_accepted(text: str) -> None:
    MeshSpec.parse(text).check(LLAMA)
    MeshSpec.parse(text).check(MIXTRAL)
    MeshSpec.parse(text).check(MeshFacts(layers=32))


def test_a_rank_has_at_least_one_key_head() -> None:
    assert [MeshSpec(tp).kv_heads_per_rank(LLAMA) for tp in (1, 2, 8, 16)] == [8, 4, 1, 1]
    assert MeshSpec(tp=2, cp=2, sp="ulysses").kv_heads_per_rank(LLAMA) == 2
    assert MeshSpec(4).kv_heads_per_rank(MeshFacts(layers=4, heads=8)) == 0
