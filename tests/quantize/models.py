"""A tiny model whose matrices fit all groups, and its quantized copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bankfull.quantize.recipe import QuantizeRecipe, parse_recipe
from bankfull.quantize.table import METHODS
from bankfull.synthetic.checkpoint import write_checkpoint

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def random_folder(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    return write_checkpoint("tiny", SHAPE | changes, folder, dtype).path


def recipe_of(method: str = "rtn", bits: str | None = None, group: str | None = None, **more: Any) -> QuantizeRecipe:
    return parse_recipe(method, bits, group, methods=tuple(METHODS), **more)
