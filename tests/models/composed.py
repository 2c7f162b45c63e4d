"""Models as data for tests: one small configuration for each kind of mixer, and their weights as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.weights.source import open_model

SIZES: dict[str, Any] = {
    "model_type": "bankfull",
    "vocab_size": 61,
    "hidden_size": 32,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
}
LAYERS: dict[str, str] = {
    "attention": "2 x attention",
    "window": "local(5, qk_norm=true, bias=true), attention(rope=false, feed=dense)",
    "mamba": "2 x mamba(state=4, inner=48, feed=none)",
    "mamba2": "2 x mamba2(state=8, inner=48, head_dim=12, groups=2, feed=none)",
    "s4": "s4(state=6), s4(rule=bilinear)",
    "based": "conv(3), based(4), local(5)",
    "lightning": "2 x lightning(6)",
    "delta": "2 x delta(6, key_heads=2, key_dim=5)",
    "hybrid": "attention, 2 x [mamba(state=4, feed=none), delta], local(7)",
    "mla": "mla(10, head_dim=8, rope_dim=4), mla(12, query_rank=9, window=7, key_dim=6)",
    "shared": "2 x local(6, share_every=2), 3 x normed(share_every=2), normed(share=2)",
    "experts": "2 x mixed, plain",
    "sparse": "local(4, dilation=3, global_tokens=2), local(8, stride=8), local(8, stride=8, columns=2, aligned=true)",
    "parallel": "attention + mamba2(state=8, head_dim=16), local(4) + delta(8)",
}
"""By the name of a case: the layers of a model."""
BLOCKS: dict[str, Any] = {
    "normed": {"mixer": "attention", "qk_norm": True},
    "mixed": {"mixer": "attention", "feed": {"kind": "experts", "count": 5, "per_token": 2, "inner": 12, "shared": 8}},
    "plain": {
        "mixer": "mamba",
        "state": 4,
        "feed": {"kind": "experts", "count": 3, "per_token": 1, "inner": 16, "renormalize": False},
    },
}


def config_of(case: str) -> dict[str, Any]:
    return {**SIZES, "layers": LAYERS[case], "blocks": BLOCKS}


def served(folder: Path, dtype: torch.dtype = torch.float32, providers: str = "torch") -> Decoder:
    files = open_model(folder)
    return build_model(files.config, Build(files.source, kit_for("cpu", providers), dtype, torch.device("cpu")))
