"""Variants of a model for comparison: stored in fewer bytes, or with another attention architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bankfull.layers.attention import Attention
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.model.memory import weight_bytes
from bankfull.limits.model.recipe import Recipe, files_for_config, recipe_of
from bankfull.models.blocks import with_full_attention
from bankfull.models.registry import Config
from bankfull.ops.pages.rounded import is_rounded
from bankfull.state.spec import Shared
from bankfull.weights.safetensors import COMPOSED

WIDTHS = ("int8", "int4")
LOCAL_WINDOW, LOCAL_PERIOD = 1024, 6
"""Gemma 3's pattern: one layer in six attends to all tokens, the others to the last 1024."""
WORTH_IT = 0.9
"""Fraction of the weight bytes kept; a quantized variant must be below it."""
SHARING = 4
"""Query heads per key head in the GQA variant of a model without GQA."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    recipe: Recipe
    options: Mapping[str, str] = field(default_factory=dict)
    """Engine options that produce the variant; empty if the model must be trained or stored differently."""
    trained: bool = False
    """Whether the variant needs another trained model."""


def variants_of(base: Recipe, device: str) -> Iterator[Variant]:
    """One or two variants of each kind, without those the model already has."""
    metered = base.metered()
    yield from with_other_storage(base, metered, device)
    yield from with_other_key_heads(base, metered)
    yield from with_other_windows(base, metered)
    yield from without_savings(base, metered)


# -- the same weights and state in fewer bytes


def with_other_storage(base: Recipe, metered: MeteredModel, device: str) -> Iterator[Variant]:
    rounded = [quantized(base, width, device) for width in WIDTHS]
    narrower = [variant for variant in rounded if variant is not None]
    yield from narrower
    pages = with_int8_pages(base, metered)
    if pages is not None:
        yield pages
        if narrower:
            both = replace(narrower[-1].recipe, kv_dtype=torch.int8)
            options = {**narrower[-1].options, **pages.options} if narrower[-1].options else {}
            yield Variant(f"{narrower[-1].name} and int8 KV cache", both, options)
    if base.quantized_types:
        yield Variant("not quantized", unquantized(base, device))


def quantized(base: Recipe, width: str, device: str) -> Variant | None:
    """Matrices quantized as by --quantize; None if that saves little."""
    # A quantized file is not quantized again: the user needs a smaller file of the same model.
    files = files_for_config(base.config) if base.quantized_types else base.files
    recipe = recipe_of(files, device, replace(base.run, quantize=width))
    if weight_bytes(recipe) >= WORTH_IT * weight_bytes(base):
        return None
    return Variant(f"{width} weights", recipe, {} if base.quantized_types else {"quantize": width})


def with_int8_pages(base: Recipe, metered: MeteredModel) -> Variant | None:
    if is_rounded(base.kv_dtype) or not metered.takes_rounded_pages:
        return None
    return Variant("int8 KV cache", replace(base, kv_dtype=torch.int8), {"kv_dtype": "int8"})


def unquantized(base: Recipe, device: str) -> Recipe:
    """The model as an unquantized checkpoint."""
    return recipe_of(files_for_config(base.config), device, replace(base.run, quantize=None, activations="auto"))


# -- another model


def with_other_key_heads(base: Recipe, metered: MeteredModel) -> Iterator[Variant]:
    """Other numbers of key heads: MHA, GQA, MQA."""
    heads = next((mixer.heads for mixer in metered.model.mixers if isinstance(mixer, Attention)), None)
    if heads is None:
        return
    names: dict[int, str] = {heads.count: "one KV head per query head (MHA)", 1: "one KV head (MQA)"}
    if heads.kv == heads.count and heads.count % SHARING == 0:
        names.setdefault(heads.count // SHARING, f"one KV head per {SHARING} query heads (GQA)")
    for count, name in names.items():
        other = replace(base, config=_with_key_heads(base.config, count))
        if count != heads.kv and _takes_key_heads(other, count):
            yield Variant(name, other, trained=True)


def _with_key_heads(config: Config, count: int) -> dict[str, Any]:
    nested = config.get("text_config")
    if isinstance(nested, dict):
        return {**config, "text_config": {**nested, "num_key_value_heads": count}}
    return {**config, "num_key_value_heads": count}


def _takes_key_heads(recipe: Recipe, count: int) -> bool:
    """Some families ignore num_key_value_heads."""
    return all(m.heads.kv == count for m in recipe.metered().model.mixers if isinstance(m, Attention))


def with_other_windows(base: Recipe, metered: MeteredModel) -> Iterator[Variant]:
    """Other attention windows."""
    windows = [mixer.heads.sight if isinstance(mixer, Attention) else None for mixer in metered.model.mixers]
    if not any(isinstance(mixer, Attention) for mixer in metered.model.mixers):
        return
    if any(isinstance(spec, Shared) for states in metered.model.states() for spec in states):
        return  # a window would change only the layers that own their keys and values
    if any(window is not None for window in windows):
        yield Variant("full attention in every layer", replace(base, windows=(None,) * len(windows)), trained=True)
        return
    pattern = tuple(None if layer % LOCAL_PERIOD == LOCAL_PERIOD - 1 else LOCAL_WINDOW for layer in range(len(windows)))
    name = f"window of {LOCAL_WINDOW} tokens in {LOCAL_PERIOD - 1} of {LOCAL_PERIOD} layers"
    yield Variant(name, replace(base, windows=pattern), trained=True)


def without_savings(base: Recipe, metered: MeteredModel) -> Iterator[Variant]:
    """A model as data with plain attention: what its windows, KV heads and sharing save."""
    if base.config.get("model_type") != COMPOSED or not metered.layout.paged:
        return
    plain = replace(base, config=with_full_attention(base.config))
    if plain.metered().layout.token_bytes != metered.layout.token_bytes:
        yield Variant("MHA and full attention in every layer, nothing shared", plain, trained=True)
