"""The meter compared with torch's operation count and with real tensors, for every architecture."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bankfull.layers.build import Build
from bankfull.layers.experts import Experts
from bankfull.layers.latent import LatentAttention
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.models.registry import FAMILIES, build_model
from bankfull.ops import kit_for
from bankfull.runtime.forward import plan_mixers
from bankfull.runtime.naive import single_batch
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.weights.source import normalize_config, open_model
from tests.limits.models import LLAMA, MIXED, RECURRENT, save_directory
from tests.models.cases import CASES
from tests.models.composed import SIZES
from tests.models.diffusion import llada_config

CPU = torch.device("cpu")
PRODUCTS = (
    "linear",
    "head/linear",
    "paged_attention",
    "latent_attention",
    "absorb_queries",
    "head_products",
    "causal_conv",
    "causal_conv_silu",
    "expert_mlp",
)
"""Operations that torch counts: multiplications, not sums or functions."""
OPT = {
    "model_type": "opt",
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "dtype": "float32",
    "do_layer_norm_before": True,
    "activation_function": "relu",
}
TEXT = {key: value for key, value in MIXED.items() if key not in ("model_type", "dtype")}
CONFIGS: dict[str, dict[str, Any]] = {
    "bankfull": {
        **SIZES,
        "layers": "local(7), global, mamba(state=4)",
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "llama": LLAMA,
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 7},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 24},
    "phi3": {**LLAMA, "model_type": "phi3"},
    "smollm3": {**LLAMA, "model_type": "smollm3"},
    "opt": OPT,
    "gemma2": {**MIXED, "model_type": "gemma2", "rope_local_base_freq": None},
    "gemma3_text": MIXED,
    "gemma3": {"model_type": "gemma3", "dtype": "float32", "text_config": {**TEXT, "model_type": "gemma3_text"}},
    "mamba": RECURRENT,
    "Dream": {**LLAMA, "model_type": "Dream", "mask_token_id": 3},
    "sdar": {**LLAMA, "model_type": "sdar", "head_dim": 24, "mask_token_id": 3, "block_size": 4},
    "llada": {**llada_config(), "dtype": "float32"},
}
"""Small models in which torch's count is easy to check. Other families use their case in tests/models."""


@cache
def config_of(kind: str) -> dict[str, Any]:
    if kind in CONFIGS:
        return CONFIGS[kind]
    return normalize_config({**CASES[kind.replace("_", "-")]().config.to_dict(), "dtype": "float32"})


def test_no_configuration_is_left_over() -> None:
    assert set(CONFIGS) <= set(FAMILIES)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_multiplies_as_often_as_torch_counts(name: str, tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / name, config_of(name)))
    metered = MeteredModel(files)
    model = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU))
    layout = layout_of(model.states(), 16)
    storage = Storage(layout, sum(-(-40 // g.page_tokens) for g in layout.paged), 2, CPU)
    for start in range(12):
        batch = single_batch(layout, list(range(40)), start, 1, start, CPU)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model.head(model.forward(batch, storage.layers, plan_mixers(model, layout, batch)))
        ledger = metered.cost(StepShape.decode(1, start + 1))
        # The reference operation reads whole pages and masks them; the meter counts only tokens within the window.
        beyond = 0.0
        for mixer in model.mixers:
            heads = getattr(mixer, "heads", None)
            if heads is not None and heads.window is not None:
                beyond += 4.0 * heads.count * heads.size * max(0, start + 1 - heads.window)
            if isinstance(mixer, LatentAttention):
                beyond -= 3.0 * mixer.shape.heads * mixer.shape.rope  # absorbing queries includes their RoPE
        counted = counter.get_total_flops() - beyond
        assert counted == sum(ledger.total[product].flops for product in PRODUCTS if product in ledger.total)


@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_reads_every_tensor_once_but_of_the_embedding_one_row(name: str, tmp_path: Path) -> None:
    files = open_model(save_directory(tmp_path / name, config_of(name)))
    metered = MeteredModel(files)
    sizes = {key: tensor.nbytes for key, tensor in metered.shapes.read.items()}
    share = next((feed.rule.share for block in metered.model.blocks if isinstance(feed := block.feed, Experts)), 1.0)
    stacked = (".experts.", "_moe.input_linear.", "_moe.output_linear.")
    sizes = {key: int(size * share) if any(n in key for n in stacked) else size for key, size in sizes.items()}
    tables = [key for key in sizes if "embed" in key or key.endswith(("wte.weight", "wpe.weight"))]
    tied = not any("lm_head" in key or "transformer.ff_out" in key for key in sizes)
    rows = sum(sizes[key] // metered.shapes.read[key].shape[0] for key in tables)
    head = max(sizes[key] for key in tables if "position" not in key and "wpe" not in key) if tied else 0
    weights = sum(size for key, size in sizes.items() if key not in tables) + rows + head
    read = metered.cost(StepShape.decode(1, 1)).sum().read
    assert weights <= read < 1.35 * weights, "bytes read besides weights are activations"
