"""Layouts over ranks: bytes on the wire, memory per rank, and time of collectives."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.limits.layout.dims import AttentionDims, ExpertDims, LayerBytes, LayerDims, ModelDims
from bankfull.limits.layout.measured import dims_of
from bankfull.limits.layout.memory import kv_share, most_weights, rank_weights, side_weights, state_share
from bankfull.limits.layout.wire import WireExchange, exchanges, kv_bytes, sent_bytes, summed
from bankfull.limits.machine import catalogue
from bankfull.limits.machine.links import DeviceLink, Interconnect
from bankfull.limits.model.memory import weight_bytes
from bankfull.limits.model.recipe import recipe_of
from bankfull.ranks.mesh import ALONE, MeshSpec
from bankfull.weights.source import normalize_config
from tests.models.cases import CASES
from tests.parallel.test_mesh import meshes

TODAY = date(2026, 11, 18)
FAST = DeviceLink("fast", "Fast", 1e11, 1e-6, 1e-7, "none", TODAY)
SLOW = DeviceLink("slow", "Slow", 1e9, 1e-5, 1e-6, "none", TODAY)
DENSE = LayerDims(attention=AttentionDims(8, 4, 16, 16, 32), width=96, bytes=LayerBytes(300.0, 7.0, 60.0, 0.0, 64.0))
ROUTED = replace(DENSE, width=0, experts=ExpertDims(60, 4, 240), bytes=replace(DENSE.bytes, experts=960.0))
LATENT = LayerDims(attention=AttentionDims(8, 0, 24, 16, 24), width=96, bytes=LayerBytes(300.0, 9.0, token_state=48.0))
RECURRENT = LayerDims(1, bytes=LayerBytes(200.0, 5.0, sequence_state=512.0))
MODEL = ModelDims(64, 100, (DENSE, ROUTED, LATENT, RECURRENT, DENSE, DENSE), 2, 50.0, 40.0, 3.0)
TOKENS = st.integers(1, 4096)


@given(meshes(), TOKENS, st.integers(0, 64))
def test_bytes_are_never_negative_and_grow_with_tokens_and_rows(mesh: MeshSpec, tokens: int, rows: int) -> None:
    for stage in range(mesh.pp):
        found = exchanges(MODEL, mesh, tokens, rows, stage)
        assert all(one.sent >= 0 and one.hops > 0 for one in found)
        assert sent_bytes(MODEL, mesh, tokens, rows, stage) <= sent_bytes(MODEL, mesh, tokens + 1, rows + 1, stage)


@given(meshes(), TOKENS)
def test_twice_the_tokens_are_twice_the_bytes(mesh: MeshSpec, tokens: int) -> None:
    for stage in range(mesh.pp):
        once, twice = (sent_bytes(MODEL, mesh, n * tokens, n * 8, stage) for n in (1, 2))
        assert twice == pytest.approx(2 * once)


@given(TOKENS, st.integers(0, 64))
def test_one_rank_sends_nothing(tokens: int, rows: int) -> None:
    assert exchanges(MODEL, ALONE, tokens, rows) == []


@given(meshes(), TOKENS)
def test_time_falls_with_bandwidth_and_latency(mesh: MeshSpec, tokens: int) -> None:
    def seconds(link: DeviceLink) -> float:
        links = Interconnect(link, link)
        return sum(one.seconds(mesh, links) for one in exchanges(MODEL, mesh, tokens, 1))

    slow = seconds(SLOW)
    assert seconds(replace(SLOW, bytes_per_s=1e12)) <= slow and seconds(replace(SLOW, hop_seconds=1e-9)) <= slow
    assert (seconds(FAST) < slow) == (mesh.ranks > 1)


@given(meshes())
def test_all_ranks_together_hold_at_least_the_model_and_none_holds_more(mesh: MeshSpec) -> None:
    whole = sum(mesh.stage_ranks * rank_weights(MODEL, mesh, stage) for stage in range(mesh.pp))
    assert whole >= MODEL.weight_bytes * (1 - 1e-12)
    assert most_weights(MODEL, mesh) <= MODEL.weight_bytes * (1 + 1e-12)
    assert mesh.ranks * state_share(MODEL, mesh) >= 1 - 1e-12 and state_share(MODEL, mesh) <= 1 + 1e-12


def test_feed_forward_ranks_hold_the_feed_forward_layers_and_the_others_hold_the_rest() -> None:
    for case, mesh in (("llama", MeshSpec(ffn=1)), ("mixtral", MeshSpec(tp=2, ffn=2, ep=2))):
        dims = dims_of(recipe_of(normalize_config(CASES[case]().config.to_dict()), "cpu"))
        mixers, feeds = side_weights(dims, mesh, 0)
        assert most_weights(dims, mesh) == max(mixers, feeds)
        own = [layer.bytes for layer in dims.layers]
        copied = sum(one.feed_copied for one in own)
        assert mesh.ffn * (feeds - copied) == pytest.approx(sum(one.feed + one.experts for one in own))
        assert (copied > 0) == (case == "mixtral"), "routers are on each of them"
        whole = mesh.tp * mixers + mesh.ffn * feeds
        assert dims.weight_bytes <= whole * (1 + 1e-12)
        if mesh.ranks == 2:
            assert whole == pytest.approx(dims.weight_bytes)


@given(st.integers(1, 4), st.integers(1, 4), TOKENS)
def test_rows_cross_to_feed_forward_ranks_and_back_in_each_layer_that_has_one(tp: int, ffn: int, tokens: int) -> None:
    """As docs/parallel.md counts them: T H f numbers there and T H t back, over all senders."""
    found = exchanges(MODEL, MeshSpec(tp, ffn=ffn), tokens, 1)
    size = tokens * MODEL.hidden * MODEL.item_bytes
    crossing = [one for one in found if one.kind == "send"]
    assert len(crossing) == 2 * (len(MODEL.layers) - 1)
    assert sum(one.sent * (ffn if one.by_feeds else tp) for one in crossing) == pytest.approx(
        size * (tp + ffn) * (len(MODEL.layers) - 1)
    )
    added = {one.axis: one.count for one in summed(found) if one.what == "sum of a branch"}
    assert added == {axis: n for axis, n in (("tp", 6.0), ("ffn", 5.0)) if {"tp": tp, "ffn": ffn}[axis] > 1}


def test_copies_of_hot_experts_take_memory_and_save_bytes_on_the_wire() -> None:
    plain, hot = MeshSpec(2, ep=2), MeshSpec(2, ep=2, hot=6)
    assert most_weights(MODEL, hot) - most_weights(MODEL, plain) == pytest.approx(960.0 * 6 / 60)
    sent = [[one.sent for one in exchanges(MODEL, mesh, 9, 1) if one.axis == "ep"] for mesh in (plain, hot)]
    assert sent[1] == pytest.approx([one * (1 - 6 / 60) for one in sent[0]])
    assert len(sent[0]) == 2


@given(meshes(), st.integers(1, 40))
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(mesh: MeshSpec, more: int) -> None:
    layers = mesh.pp + more
    stages = mesh.stages(layers)
    assert [n for first, last in stages for n in range(first, last)] == list(range(layers))
    sizes = [last - first for first, last in stages]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_a_ring_of_p_ranks_sends_the_known_shares() -> None:
    def sent(kind: str) -> float:
        return WireExchange("tp", "x", kind, 4, 1000.0, 3).sent

    assert sent("all-reduce") == 3 * 2 * 750 and sent("all-gather") == sent("reduce-scatter") == 3 * 750
    assert sent("all-to-all") == 3 * 750 and sent("send") == 3000
    assert (
        WireExchange("tp", "x", "all-reduce", 4, 8.0).hops == 6
        and WireExchange("tp", "x", "all-gather", 4, 8.0).hops == 3
    )


def test_tensor_ranks_add_two_branches_of_every_layer() -> None:
    model = replace(MODEL, layers=(DENSE,) * 5)
    found = {one.what: one for one in summed(exchanges(model, MeshSpec(tp=2), 7, 3))}
    assert found["sum of a branch"].count == 10 and found["sum of a branch"].sent_once == 7 * 64 * 2
    assert found["embedding"].sent == 7 * 64 * 2 and found["logits"].sent == 3 * 100 * 2 / 2


@given(TOKENS)
def test_megatron_sends_the_bytes_of_the_all_reduces(tokens: int) -> None:
    """And of the rows of the head, instead of half of the embedding's."""
    plain, scattered = (sent_bytes(MODEL, MeshSpec(tp=2, sp=sp), tokens, tokens) for sp in ("off", "megatron"))
    assert scattered == pytest.approx(plain)


def test_experts_on_other_ranks_receive_their_share_of_the_tokens() -> None:
    model = replace(MODEL, layers=(ROUTED,))
    found = {one.what: one for one in exchanges(model, MeshSpec(cp=4, ep=4), 8, 0)}
    # Two tokens of a rank, four experts each, three of four of them elsewhere.
    assert found["tokens to experts"].sent == found["results of experts"].sent == 2 * 4 * 64 * 2 * 3 / 4
    kinds = {
        sp: {one.what for one in exchanges(model, MeshSpec(tp=2, ep=2, sp=sp), 8, 0)} for sp in ("off", "megatron")
    }
    # Ranks that route a part of the tokens need the results of the others, unless they go on with their part.
    assert "results of all ranks" in kinds["off"] and "results of all ranks" not in kinds["megatron"]


def test_a_stage_sends_its_hidden_states_once() -> None:
    mesh = MeshSpec(pp=3)
    assert [sent_bytes(MODEL, mesh, 5, 1, stage) for stage in range(3)] == [5 * 64 * 2, 5 * 64 * 2, 0]


def test_key_heads_are_copied_and_latents_are_split_by_tokens_only() -> None:
    assert [kv_share(DENSE, MeshSpec(tp)) for tp in (1, 2, 4, 8)] == [1, 1 / 2, 1 / 4, 1 / 4]
    assert kv_share(LATENT, MeshSpec(tp=4)) == 1 and kv_share(LATENT, MeshSpec(tp=4, cp=2)) == 1 / 2
    assert kv_share(DENSE, MeshSpec(cp=2, sp="ulysses")) == 1 / 2
    assert kv_bytes(MODEL, 10) == 10 * (4 * 64 + 48) + 512


def test_groups_that_leave_a_machine_use_the_slower_link() -> None:
    links = Interconnect(FAST, SLOW, per_machine=4)
    assert links.link(4) is FAST and links.link(5) is SLOW
    one = WireExchange("tp", "x", "all-reduce", 4, 1e6)
    assert one.seconds(MeshSpec(tp=4), links) < replace(one, axis="cp").seconds(MeshSpec(tp=2, cp=4), links)


def test_a_mesh_is_checked_against_every_layer() -> None:
    MODEL.check(MeshSpec(tp=2, ep=2))
    with pytest.raises(ConfigError, match="60 experts over 8 ranks"):
        MODEL.check(MeshSpec(tp=8, ep=8))
    with pytest.raises(ConfigError, match="has none"):
        replace(MODEL, layers=(DENSE,)).check(MeshSpec(tp=2, ep=2))


def test_a_device_has_the_bandwidth_of_its_link() -> None:
    known = catalogue.load()
    for device in known:
        if device.link is not None:
            assert device.link_bytes_per_s == 2 * known.find_link(device.link).bytes_per_s
    assert {"nvlink-3", "nvlink-4", "nvlink-5", "pcie-4", "pcie-5", "infiniband-200", "infiniband-400"} < set(
        known.links
    )
    assert {"ethernet-10", "ethernet-100", "shared-memory"} < set(known.links)
    with pytest.raises(ConfigError, match="no link 'telegraph'; it has nvlink-3"):
        known.find_link("telegraph")


def config_of(case: str) -> Any:
    made: Any = CASES[case]()
    made = made[0] if isinstance(made, tuple) else made
    made = getattr(made, "config", made)
    return normalize_config(made if isinstance(made, dict) else made.to_dict())


@pytest.mark.parametrize(
    "case", ["llama", "gpt2", "gpt-neox", "phi3", "opt", "mamba2", "jamba", "deepseek-v2", "mixtral", "falcon-h1"]
)
def test_every_weight_of_a_family_has_a_place(case: str) -> None:
    recipe = recipe_of(config_of(case), "cpu")
    dims = dims_of(recipe)
    assert dims.weight_bytes == pytest.approx(weight_bytes(recipe))
    assert dims.state_bytes[0] == recipe.metered().layout.token_bytes
    split = sum(layer.bytes.split + layer.bytes.kv + layer.bytes.experts for layer in dims.layers)
    assert split > sum(layer.bytes.copied for layer in dims.layers)
    assert most_weights(dims, MeshSpec(tp=2)) < 0.7 * dims.weight_bytes


def test_the_dimensions_of_known_families() -> None:
    latent = dims_of(recipe_of(config_of("deepseek-v2"), "cpu"))
    assert all(layer.attention is not None and layer.attention.kv_heads == 0 for layer in latent.layers)
    assert any(layer.experts is not None for layer in latent.layers) and latent.head_bytes > 0
    assert all(layer.branches == 1 for layer in dims_of(recipe_of(config_of("mamba2"), "cpu")).layers)
    assert all(layer.branches == 1 for layer in dims_of(recipe_of(config_of("gpt-neox"), "cpu")).layers)
