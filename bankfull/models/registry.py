"""The family of each `model_type`. A family is one file in this folder that declares its models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from bankfull.errors import ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.ranks.splitting import Splitting
from bankfull.ranks.stage import LAYER
from bankfull.spread.decoder import staged

Config = Mapping[str, Any]

#: model_type -> file. A table instead of imports, so that only the needed family is imported.
FAMILIES = {
    "bankfull": "composed",
    "Dream": "dream",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "falcon_h1": "falcon_h1",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3_text": "gemma",
    "glm": "glm",
    "glm4": "glm",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "hunyuan_v1_dense": "hunyuan",
    "llada": "llada",
    "granitemoehybrid": "granite_hybrid",
    "jamba": "jamba",
    "llama": "llama",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "minimax": "minimax",
    "mistral": "llama",
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "olmo2": "olmo2",
    "opt": "opt",
    "phi3": "phi3",
    "qwen2": "qwen",
    "qwen2_moe": "qwen_moe",
    "qwen3": "qwen",
    "qwen3_moe": "qwen_moe",
    "sdar": "sdar",
    "qwen3_next": "qwen3_next",
    "smollm3": "smollm3",
}

#: Patterns of tensors that files contain and no model needs.
IGNORED_ANYWHERE = (r"(^|\.)rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$")


@dataclass(frozen=True, slots=True)
class Family:
    build: Callable[[Config, Build], Decoder]
    ignored: Callable[[Config], tuple[str, ...]] = lambda config: ()
    """Patterns of tensors that this model leaves unread on purpose (a tied head, a vision tower)."""
    split: Callable[[Splitting], None] | None = None
    """Divides the fields of a configuration over ranks; None: the model runs in stages only."""


def family_of(config: Config) -> Family:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        from bankfull.models.unsupported import why_unsupported

        why = why_unsupported(kind[:80], FAMILIES) if isinstance(kind, str) else "choose another model"
        raise ModelError(
            f"Architecture {repr(kind)[:80]} is not supported: {why} (docs/architectures.md lists all "
            f"{len(FAMILIES)} that are)."
        )
    family = import_module(f"bankfull.models.{FAMILIES[kind]}").FAMILY
    assert isinstance(family, Family)
    return family


def rank_config(config: Config, ranks: int, feed_ranks: int, spread: bool) -> Config:
    """The configuration that a rank builds its model from; arguments as of `Splitting`."""
    splitting, kind = Splitting(config, ranks, feed_ranks, spread), config.get("model_type")
    split = family_of(config).split if kind in FAMILIES else None
    if split is not None:
        split(splitting)
    elif ranks > 1 or feed_ranks > 1:
        raise ConfigError(
            f"Architecture {str(kind)[:80]!r} cannot be split over tensor ranks or feed-forward ranks yet; use pp, or "
            "say in its Family how (CONTRIBUTING.md has the recipe)."
        )
    return splitting.own


def stages_of(config: Config, stages: int) -> int:
    """The layers of a model that can be cut into so many stages."""
    layers = layer_count(config)
    if stages > layers:
        raise ConfigError(f"The layout has {stages} stages, but the model has only {layers} layers; lower pp.")
    return layers


def layer_count(config: Config) -> int:
    """The layers of a model."""
    if config.get("model_type") == "bankfull":
        from bankfull.models.blocks import plans_of  # it imports the layers of every kind

        return len(plans_of(config))
    nested = config.get("text_config")
    for fields in (config, nested if isinstance(nested, dict) else {}):
        for name in ("num_hidden_layers", "n_layers"):
            if isinstance(fields.get(name), int):
                return int(fields[name])
    raise ConfigError("The model's configuration does not say how many layers it has, so that no stages can be made.")


def build_model(config: Config, build: Build) -> Decoder:
    """The model with all its weights. A missing tensor, or one that the model does not read, is an error naming it."""
    family = family_of(config)
    if build.shard is not None:
        config = rank_config(config, *build.split, build.experts is not None)
    try:
        model = family.build(config, build)
    except KeyError as missing:
        raise ModelError(f"The model's configuration lacks {missing.args[0]!r}.") from None
    if build.context is not None or build.sequence != "off":
        from bankfull.spread.tokens import spread_tokens  # only ranks need it

        model = spread_tokens(model, build)
    patterns = [re.compile(p) for p in (*IGNORED_ANYWHERE, *family.ignored(config))]
    unread = [name for name in build.source.unread() if not any(p.search(name) for p in patterns)]
    forgotten = [name for name in unread if not _below(name, build.elsewhere)]
    if build.stage is not None:
        forgotten = [name for name in forgotten if LAYER.search(name) and build.stage.holds(name)]
        model = staged(model, build, build.stage)
    if forgotten:
        more = f" and {len(forgotten) - 3} more" if len(forgotten) > 3 else ""
        raise ModelError(
            f"The file holds tensors that architecture {config['model_type']!r} does not use: "
            f"{', '.join(sorted(forgotten)[:3])}{more}; use the configuration that belongs to the file."
        )
    return model


def _below(name: str, modules: set[str]) -> bool:
    """Whether a tensor belongs to one of the modules."""
    parts = name.split(".")
    return bool(modules) and any(".".join(parts[:count]) in modules for count in range(1, len(parts)))
