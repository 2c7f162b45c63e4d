"""The same model stored in fewer bytes, or built another way: further models on the meter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bankfull.layers.attention import Attention
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.model.memory import weight_bytes
from bankfull.limits.model.recipe import Recipe, imagined, recipe_of
from bankfull.models.registry import Config

WIDTHS = ("int8", "int4")
LOCAL_WINDOW, LOCAL_PERIOD = 1024, 6
"""Gemma 3's pattern: one layer in six sees everything, the others the last 1024 tokens."""
WORTH_IT = 0.9
"""Of the bytes: what is left of them must be less."""
SHARING = 4
"""Query heads for each key head, in a variant of a model that shares none."""


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    recipe: Recipe
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the engine, that make it so; none for what a model must be trained for, or stored as."""
    trained: bool = False
    """Is it another model?"""


def variants_of(base: Recipe, device: str) -> Iterator[Variant]:
    """Of each kind one or two; nothing that the model has already."""
    metered = base.metered()
    yield from stored_otherwise(base, metered, device)
    yield from shared_otherwise(base, metered)
    yield from seen_otherwise(base, metered)


# -- the same weights and state in fewer bytes


def stored_otherwise(base: Recipe, metered: MeteredModel, device: str) -> Iterator[Variant]:
    rounded = [quantized(base, width, device) for width in WIDTHS]
    narrower = [variant for variant in rounded if variant is not None]
    yield from narrower
    pages = with_int8_pages(base, metered)
    if pages is not None:
        yield pages
        if narrower:
            both = replace(narrower[-1].recipe, kv_dtype=torch.int8)
            options = {**narrower[-1].options, **pages.options} if narrower[-1].options else {}
            yield Variant(f"{narrower[-1].name} and int8 keys and values", both, options)
    if base.blocks:
        yield Variant("not quantized", unquantized(base, device))


def quantized(base: Recipe, width: str, device: str) -> Variant | None:
    """Matrices in `width`, as the option of that name rounds them; None where that saves little."""
    # A file in blocks is not rounded a second time: a smaller one, of the same model, has to be had.
    files = imagined(base.config) if base.blocks else base.files
    made = recipe_of(files, device, replace(base.run, quantize=width))
    if weight_bytes(made) >= WORTH_IT * weight_bytes(base):
        return None
    return Variant(f"{width} weights", made, {} if base.blocks else {"quantize": width})


def with_int8_pages(base: Recipe, metered: MeteredModel) -> Variant | None:
    if base.kv_dtype == torch.int8 or not metered.layout.paged:
        return None
    return Variant("int8 keys and values", replace(base, kv_dtype=torch.int8), {"kv_dtype": "int8"})


def unquantized(base: Recipe, device: str) -> Recipe:
    """As checkpoints come."""
    return recipe_of(imagined(base.config), device, replace(base.run, quantize=None, activations="auto"))


# -- another model


def shared_otherwise(base: Recipe, metered: MeteredModel) -> Iterator[Variant]:
    """How many query heads read the same keys."""
    heads = next((mixer.heads for mixer in metered.model.mixers if isinstance(mixer, Attention)), None)
    if heads is None:
        return
    found: dict[int, str] = {heads.count: "a key head for each query head (no GQA)", 1: "one key head for all (MQA)"}
    if heads.kv == heads.count and heads.count % SHARING == 0:
        found.setdefault(heads.count // SHARING, f"a key head for {SHARING} query heads (GQA)")
    for count, name in found.items():
        other = replace(base, config=_with_key_heads(base.config, count))
        if count != heads.kv and _takes_key_heads(other, count):
            yield Variant(name, other, trained=True)


def _with_key_heads(config: Config, count: int) -> dict[str, Any]:
    nested = config.get("text_config")
    if isinstance(nested, dict):
        return {**config, "text_config": {**nested, "num_key_value_heads": count}}
    return {**config, "num_key_value_heads": count}


def _takes_key_heads(recipe: Recipe, count: int) -> bool:
    """Some families have no such setting."""
    return all(m.heads.kv == count for m in recipe.metered().model.mixers if isinstance(m, Attention))


def seen_otherwise(base: Recipe, metered: MeteredModel) -> Iterator[Variant]:
    """How far back layers see."""
    windows = [mixer.heads.window if isinstance(mixer, Attention) else None for mixer in metered.model.mixers]
    if not any(isinstance(mixer, Attention) for mixer in metered.model.mixers):
        return
    if any(window is not None for window in windows):
        yield Variant("every layer sees everything", replace(base, windows=(None,) * len(windows)), trained=True)
        return
    pattern = tuple(None if layer % LOCAL_PERIOD == LOCAL_PERIOD - 1 else LOCAL_WINDOW for layer in range(len(windows)))
    name = f"{LOCAL_PERIOD - 1} of {LOCAL_PERIOD} layers see {LOCAL_WINDOW} tokens"
    yield Variant(name, replace(base, windows=pattern), trained=True)
