"""The blocks of a composed model: from the settings in its configuration to checked shapes, one plan per layer.

Nothing here needs a tensor. `composed.py` builds the served layers from the plans, and training its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from bankfull.errors import ModelError
from bankfull.models.fields import ConfigFields
from bankfull.models.kinds import ALIASES, DEFAULTS, KINDS, AttentionShape, FeedShape, feed_of
from bankfull.models.notation import BlockCall, Item, Layer, Value, expanded, parse, written
from bankfull.models.registry import Config
from bankfull.models.settings import BlockSettings

SPARSE = ("dilation", "stride", "global_tokens", "columns")
NO_SAVING = {"window": None, "share": None, "share_every": 1, "aligned": False, **dict.fromkeys(SPARSE)}
"""BlockSettings of an attention layer whose KV cache is as large as it can be."""


@dataclass(frozen=True, slots=True)
class MixerPlan:
    kind: str
    shape: Any
    """The shape dataclass of the kind: `AttentionShape`, `MambaShape`, ..."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    mixers: tuple[MixerPlan, ...]
    """Several run in parallel."""
    feed: FeedShape


def plans_of(config: Config) -> list[LayerPlan]:
    """One plan for each layer of a configuration; ModelError with one sentence for a mistake."""
    fields = ConfigFields(config, DEFAULTS)
    blocks = fields.object_or_none("blocks") or {}
    known: dict[Layer, tuple[LayerPlan, tuple[_Sharing, ...]]] = {}
    plans: list[LayerPlan] = []
    sharing: list[tuple[_Sharing, ...]] = []
    for layer, inline in layers_of(config):
        if layer not in known:
            known[layer] = _plan(layer, {**blocks, **inline}, fields)
        plan, shares = known[layer]
        plans.append(plan)
        sharing.append(shares)
    return _with_owners(plans, sharing)


def layers_of(config: Config) -> list[tuple[Layer, Mapping[str, Any]]]:
    """The expanded layers, each with the inline block that it calls, if its entry is one."""
    given = config.get("layers")
    if isinstance(given, str):
        return [(layer, {}) for layer in expanded(parse(given))]
    if not isinstance(given, list) or not given:
        raise ModelError(
            f"The model's configuration has layers = {repr(given)[:80]}, but it must be a text such as "
            '"6 x [5 x local(1024), global]" or a list of such texts and blocks.'
        )
    items: list[Item] = []
    inline: dict[str, Any] = {}
    for number, entry in enumerate(given):
        if isinstance(entry, str):
            items += parse(entry)
        elif isinstance(entry, dict):
            inline[name := f"layers[{number}]"] = entry
            items.append(Layer((BlockCall(name),)))
        else:
            raise ModelError(f"Entry {number} of 'layers' is {repr(entry)[:80]}; give a text or a block.")
    return [(layer, {c.name: inline[c.name] for c in layer.calls if c.name in inline}) for layer in expanded(items)]


def with_full_attention(config: Config, kv_heads: int | None = None) -> dict[str, Any]:
    """The model to compare a KV cache with: every attention layer sees all tokens and has keys and values of its own.
    `kv_heads`: their heads; None: one for each query head."""
    fields = ConfigFields(config, DEFAULTS)
    blocks: dict[str, Any] = dict(fields.object_or_none("blocks") or {})
    layers: list[str] = []
    full: dict[BlockCall, BlockCall] = {}
    for layer, inline in layers_of(config):
        blocks |= inline
        for call in layer.calls:
            if call not in full:
                full[call] = _full_attention(call, blocks, fields, f"full{len(full)}", kv_heads)
        layers.append(written([Layer(tuple(full[call] for call in layer.calls))]))
    return {**config, "blocks": blocks, "layers": layers}


def _full_attention(
    call: BlockCall, blocks: dict[str, Any], fields: ConfigFields, name: str, kv_heads: int | None
) -> BlockCall:
    """A call of a new block in `blocks`."""
    plan, _, _ = _mixer(call, blocks, fields)
    values = {name or KINDS[plan.kind].main: value for name, value in call.values}
    blocks[name] = {"mixer": plan.kind, **_base(call.name, blocks), **values}
    if isinstance(plan.shape, AttentionShape):
        count = plan.shape.heads.count
        kv = count if kv_heads is None or count % kv_heads else kv_heads
        blocks[name] |= {"mixer": "attention", "kv_heads": kv, **NO_SAVING}
    return BlockCall(name)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """How a mixer shares the keys and values of an earlier layer."""

    block: str
    layer: int | None = None
    """The layer's number; negative: counted back from this layer."""
    every: int = 1
    """Number of successive layers with equal pages, of which the first owns them."""


def _plan(layer: Layer, blocks: Mapping[str, Any], fields: ConfigFields) -> tuple[LayerPlan, tuple[_Sharing, ...]]:
    parts = [_mixer(call, blocks, fields) for call in layer.calls]
    feeds = {feed for _, feed, _ in parts}
    if len(feeds) > 1:
        raise ModelError(
            f"The parallel blocks {', '.join(call.name for call in layer.calls)} have different feed-forward layers; "
            "a layer has one."
        )
    mixers = tuple(mixer for mixer, _, _ in parts)
    shares = tuple(share for _, _, share in parts)
    if len(mixers) > 1 and any(share.layer is not None or share.every > 1 for share in shares):
        raise ModelError(f"Block {layer.calls[0].name!r} runs in parallel with others and cannot share K/V.")
    return LayerPlan(mixers, feeds.pop()), shares


def _mixer(call: BlockCall, blocks: Mapping[str, Any], fields: ConfigFields) -> tuple[MixerPlan, FeedShape, _Sharing]:
    base = _base(call.name, blocks)
    kind = base.get("mixer", call.name)
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in KINDS:
        raise ModelError(
            f"Block {call.name!r} has the unknown mixer {repr(kind)[:80]}; mixers are {', '.join(sorted(KINDS))}."
        )
    values: dict[str, Value] = {}
    for name, value in call.values:
        name = name or KINDS[kind].main
        if name in values:
            raise ModelError(f"Block {call.name!r} is given {name!r} twice; give it once.")
        values[name] = value
    settings = BlockSettings(call.name, {**base, **values}, fields)
    share = _Sharing(call.name, settings.integer_or_none("share"), settings.size("share_every", 1))
    if kind != "attention" and (share.layer is not None or share.every > 1):
        raise ModelError(f"Block {call.name!r} has no keys and values to share; only attention has.")
    if call.name == "local" and "window" not in {**base, **values}:
        raise ModelError("Block 'local' lacks a window; write local(1024), or give it in 'blocks'.")
    shape = KINDS[kind].shape(settings)
    settings.finish()
    return MixerPlan(kind, shape), feed_of(call.name, {**base, **values}.get("feed"), fields), share


def _base(name: str, blocks: Mapping[str, Any]) -> Mapping[str, Any]:
    if name in blocks:
        base = blocks[name]
        if not isinstance(base, dict):
            raise ModelError(f"Block {name!r} is {repr(base)[:80]}, but it must be an object with settings.")
        return base
    if name in KINDS or name in ALIASES:
        return {}
    known = sorted({*blocks, *KINDS, *ALIASES})
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"blocks are {', '.join(known)}."
    raise ModelError(f"There is no block {name[:80]!r}: {hint}")


def _with_owners(plans: Sequence[LayerPlan], sharing: Sequence[tuple[_Sharing, ...]]) -> list[LayerPlan]:
    """Set the owner of the K/V of each layer that shares them."""
    resolved: list[LayerPlan] = []
    latest: dict[tuple[str, AttentionShape], tuple[int, int]] = {}
    """Owners by block and shape: the layer that last owned its pages, and how many layers have used them."""
    for number, (plan, shares) in enumerate(zip(plans, sharing, strict=True)):
        (mixer, share) = plan.mixers[0], shares[0]
        owner = None
        if share.layer is not None:
            owner = share.layer if share.layer >= 0 else number + share.layer
        elif share.every > 1:
            first, users = latest.get((share.block, mixer.shape), (number, share.every))
            latest[share.block, mixer.shape] = (number, 1) if users >= share.every else (first, users + 1)
            owner = None if users >= share.every else first
        resolved.append(plan if owner is None else _sharing(resolved, plan, number, owner, share.block))
    return resolved


def _sharing(made: Sequence[LayerPlan], plan: LayerPlan, number: int, owner: int, block: str) -> LayerPlan:
    if not 0 <= owner < number:
        raise ModelError(
            f"Layer {number} ({block!r}) shares the K/V of layer {owner}, which does not come before it; name an "
            "earlier layer."
        )
    own, its = plan.mixers[0].shape, made[owner].mixers[0].shape
    if not isinstance(its, AttentionShape) or len(made[owner].mixers) > 1 or its.owner is not None:
        raise ModelError(
            f"Layer {number} ({block!r}) shares the K/V of layer {owner}, which owns none; name an attention layer "
            "with K/V of its own."
        )
    if not own.same_pages(its):
        raise ModelError(
            f"Layer {number} ({block!r}) shares the K/V of layer {owner}, whose key heads, window or RoPE differ; "
            "make them equal."
        )
    return replace(plan, mixers=(replace(plan.mixers[0], shape=replace(own, owner=owner)),))
