"""A model as data: what its configuration means, and that a wrong one ends with one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.model.kv_saving import state_bytes
from bankfull.models.blocks import plans_of, with_full_attention
from bankfull.models.kinds import AttentionShape
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from tests.models.composed import SIZES


def config(layers: Any, **more: Any) -> dict[str, Any]:
    return {**SIZES, "layers": layers, **more}


def attention_of(found: dict[str, Any]) -> list[AttentionShape]:
    return [plan.mixers[0].shape for plan in plans_of(found)]


def test_a_list_of_texts_and_blocks_is_the_same_model_as_a_text() -> None:
    blocks = {"near": {"mixer": "attention", "window": 7}}
    text = plans_of(config("2 x near, mamba(state=4, feed=none)", blocks=blocks))
    listed = plans_of(
        config(
            [
                {"mixer": "attention", "window": 7},
                "near",
                {"mixer": "mamba", "state": 4, "feed": {"kind": "none"}},
            ],
            blocks=blocks,
        )
    )
    assert text == listed


def test_a_call_changes_the_settings_of_its_block() -> None:
    blocks = {"near": {"mixer": "attention", "window": 7, "heads": 8, "head_dim": 6, "rope": 500}}
    far, near = attention_of(config("near(window=none, kv_heads=4), near(9)", blocks=blocks))
    assert (far.heads.window, far.heads.kv, far.heads.size) == (None, 4, 6)
    assert near.heads.window == 9 and near.rope is not None and near.rope.theta == 500


def test_every_second_layer_of_a_block_shares() -> None:
    blocks = {"local": {"window": 8, "share_every": 2}, "global": {"share_every": 2}}
    owners = [shape.owner for shape in attention_of(config("2 x [3 x local, global]", blocks=blocks))]
    assert owners == [None, 0, None, None, 2, None, 5, 3]


def test_a_layer_names_the_layer_that_it_shares_with() -> None:
    owners = [shape.owner for shape in attention_of(config("attention, attention(share=0), attention(share=-2)"))]
    assert owners == [None, 0, 0]


def test_plain_attention_is_the_same_model_without_savings() -> None:
    saving = config("2 x [local(8), global, mamba(state=4)]", blocks={"global": {"kv_heads": 1}})
    shapes = [plan.mixers[0].shape for plan in plans_of(with_full_attention(saving))]
    assert [s.heads.kv for s in shapes if isinstance(s, AttentionShape)] == [4] * 4
    plain, own = (MeteredModel(c).layout for c in (with_full_attention(saving), saving))
    assert plain.recurrent is not None and own.recurrent is not None
    assert plain.recurrent.slot_bytes == own.recurrent.slot_bytes
    token = 8 * 2 * 4  # a head's key and value in float32
    assert state_bytes(own, 100) - own.recurrent.slot_bytes == token * 2 * (2 * 8 + 1 * 100)
    assert state_bytes(plain, 100) - plain.recurrent.slot_bytes == token * 4 * 4 * 100


HOSTILE: dict[str, tuple[Any, str]] = {
    "no layers": (config(None), "layers"),
    "empty list": (config([]), "layers"),
    "a number": (config(3), "layers"),
    "number in the list": (config(["attention", 7]), "Entry 1"),
    "too many layers": (config("1000000000 x attention"), "16384"),
    "nested repetition": (config("999999 x [999999 x [999999 x attention]]"), "16384"),
    "many in a list": (config(["9000 x attention", "9000 x attention"]), "18000"),
    "unknown block": (config("atention"), "did you mean 'attention'"),
    "unknown mixer": (config("a", blocks={"a": {"mixer": "transformer"}}), "unknown mixer"),
    "mixer is a list": (config("a", blocks={"a": {"mixer": [1]}}), "unknown mixer"),
    "block is text": (config("a", blocks={"a": "attention"}), "must be an object"),
    "blocks is a list": (config("a", blocks=[1]), "blocks"),
    "unknown setting": (config("attention(windw=5)"), "did you mean 'window'"),
    "a setting twice": (config("attention(5, window=6)"), "twice"),
    "negative heads": (config("attention(heads=-4)"), "heads = -4"),
    "negative hidden": (config("attention", hidden_size=-32), "hidden_size"),
    "heads that cannot share": (config("attention(heads=4, kv_heads=3)"), "cannot share"),
    "heads as text": (config("attention(heads=many)"), "'many'"),
    "window of zero": (config("local(0)"), "window = 0"),
    "local without a window": (config("local"), "lacks a window"),
    "odd head with RoPE": (config("attention(head_dim=7)"), "even"),
    "RoPE base": (config("attention(rope=0.5)"), "rope"),
    "huge state": (config("mamba(state=99999999999)"), "state"),
    "state of odd numbers": (config("s4(5)"), "even"),
    "unknown rule": (config("s4(rule=euler)"), "euler"),
    "heads that do not divide": (config("mamba2(inner=50, head_dim=16)"), "do not divide"),
    "groups that do not divide": (config("mamba2(inner=48, head_dim=16, groups=2)"), "groups cannot share"),
    "key heads that do not divide": (config("delta(heads=4, key_heads=3)"), "key heads cannot share"),
    "wide convolution": (config("conv(1000000)"), "width"),
    "narrow convolution": (config("mamba(width=1)"), "width"),
    "parallel with other feeds": (config("attention + mamba(feed=none)"), "a layer has one"),
    "parallel and shared": (config("attention, attention(share=0) + mamba"), "cannot share K/V"),
    "experts per token": (
        config("attention", feed={"kind": "experts", "count": 4, "per_token": 5, "inner": 8}),
        "5 experts per token, but only 4",
    ),
    "negative experts": (config("attention", feed={"kind": "experts", "count": -4, "per_token": 1}), "count = -4"),
    "experts without a number": (config("attention", feed="experts"), "'count'"),
    "odd RoPE key": (config("mla(rope_dim=3)"), "even"),
    "latent without a rank": (config("mla(0)"), "rank = 0"),
    "mask without a window": (config("attention(stride=4)"), "without a window"),
    "dilation and stride": (config("local(4, dilation=2, stride=4)"), "use one"),
    "columns beyond the stride": (config("local(4, stride=4, columns=5)"), "at most 4"),
    "negative stride": (config("local(4, stride=-1)"), "stride = -1"),
    "unknown feed": (config("attention(feed=moe)"), "'moe'"),
    "feed without a size": ({**config("attention(feed=dense)"), "intermediate_size": None}, "'inner'"),
    "feed of a number": (config("attention", feed=5), "feed = 5"),
    "unknown activation": (config("attention", hidden_act="sharp"), "sharp"),
    "sharing itself": (config("attention(share=0)"), "does not come before it"),
    "sharing a later layer": (config("attention(share=1), attention"), "does not come before it"),
    "sharing before the first": (config("attention(share=-1)"), "does not come before it"),
    "sharing in a chain": (config("3 x attention, attention(share=4), attention(share=3)"), "does not come before"),
    "sharing with one that shares": (config("attention, attention(share=0), attention(share=1)"), "owns none"),
    "sharing a recurrent layer": (config("mamba, attention(share=0)"), "owns none"),
    "sharing another window": (config("attention, local(4, share=0)"), "window"),
    "a recurrent layer that shares": (config("mamba(share=0)"), "only attention"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_configuration_ends_with_one_sentence(name: str) -> None:
    wrong, part = HOSTILE[name]
    with pytest.raises(ModelError) as caught:
        MeteredModel(wrong)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("device", "provider"), [("cuda", "triton"), ("cpu", "native")])
def test_sparse_masks_have_a_kernel_on_every_device(device: str, provider: str) -> None:
    found = config("local(7, stride=4)")
    kit = kit_for(device)
    build_model(found, Build(MeteredModel(found).shapes, kit, torch.float32, torch.device("meta")))
    assert set(kit.chosen["paged_attention"]) == {provider}
