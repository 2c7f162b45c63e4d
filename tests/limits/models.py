"""Configurations of tiny models of several architectures, and one model as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bankfull.limits.meter.metered import MeteredModel
from bankfull.weights.conv1d import is_stored_transposed

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 160,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
WINDOWED = {**LLAMA, "model_type": "mistral", "sliding_window": 40, "tie_word_embeddings": False}
MIXED = {
    **LLAMA,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "sliding_window": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000.0,
}
RECURRENT = {
    "model_type": "mamba",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 3,
    "dtype": "float32",
}
EXPERTS = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
}
CONFIGS = {"experts": EXPERTS, "llama": LLAMA, "windowed": WINDOWED, "mixed": MIXED, "recurrent": RECURRENT}


def save_directory(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Save the model with random weights as a Hugging Face directory; the meter determines which tensors exist."""
    shapes = MeteredModel(config).shapes.read
    generator = torch.Generator().manual_seed(0)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: (torch.randn(t.shape, generator=generator) * 0.1).to(dtype) for name, t in shapes.items()}
    stored = {name: t.T.contiguous() if is_stored_transposed(config, name) else t for name, t in tensors.items()}
    save_file(stored, path / "model.safetensors")
    return path
