"""Diffusion language models as files. `transformers` has none of them: the reference is its Llama, Qwen 2 or Qwen 3
under the mask of the paper, with the same weights under the names of the published checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import speaking_folder

MASK = 52
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLADA_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "model.layers": "model.transformer.blocks",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


@dataclass(frozen=True)
class DiffusionReference:
    """A reference model and the block whose tokens see each other; 0 = the whole sequence."""

    model: Any
    block: int

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Of every position, in one pass over the whole sequence, without a cache."""
        count = len(tokens)
        blocks = torch.arange(count) // (self.block or count)
        hidden = torch.where(blocks[None, :] <= blocks[:, None], 0.0, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            found: Tensor = self.model(
                torch.tensor([list(tokens)]), attention_mask=hidden[None, None].to(torch.float32)
            )
        return found.logits[0]  # type: ignore[attr-defined]


def llada_config() -> dict[str, Any]:
    return {
        "model_type": "llada",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "d_model": 48,
        "n_layers": 3,
        "n_heads": 6,
        "n_kv_heads": 2,
        "mlp_hidden_size": 41,
        "vocab_size": 53,
        "embedding_size": 53,
        "max_sequence_length": 256,
        "rope_theta": 7000.0,
        "rms_norm_eps": 1e-5,
        "weight_tying": False,
        "mask_token_id": MASK,
        "eos_token_id": 2,
    }


def as_llada(name: str) -> str:
    for usual, own in LLADA_NAMES.items():
        name = name.replace(usual, own)
    return name


def _unchanged(name: str) -> str:
    return name


def make(kind: str, folder: Path, *, seed: int = 11, block: int = 4, spread: float = 0.2) -> DiffusionReference:
    """Write a random model of the kind (llada, dream, sdar) to the folder; its reference."""
    torch.manual_seed(seed)
    renamed: Callable[[str], str] = _unchanged
    if kind == "llada":
        config, renamed = llada_config(), as_llada
        plain = tf.LlamaConfig(**SIZES, rope_theta=7000.0, rms_norm_eps=1e-5)
        model, block = tf.LlamaForCausalLM(plain), 0
    elif kind == "dream":
        plain = tf.Qwen2Config(**SIZES, rope_theta=9000.0)
        config = {**SIZES, "model_type": "Dream", "rope_theta": 9000.0, "mask_token_id": MASK}
        model, block = tf.Qwen2ForCausalLM(plain), 0
    else:
        plain = tf.Qwen3Config(**SIZES, head_dim=8, rope_theta=8000.0)
        config = {**SIZES, "model_type": "sdar", "head_dim": 8, "rope_theta": 8000.0, "block_size": block}
        config |= {"mask_token_id": MASK}
        model = tf.Qwen3ForCausalLM(plain)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(spread * noise if weight.dim() > 1 else weight + 0.3 * noise)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {renamed(name): weight.clone() for name, weight in model.state_dict().items()}, folder / "model.safetensors"
    )
    return DiffusionReference(model.eval(), block)


def make_speaking(folder: Path) -> Path:
    """The tiny Llama that speaks, as an SDAR with blocks of 8 tokens and random norms of heads."""
    shutil.copytree(speaking_folder(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "sdar", "block_size": 8, "mask_token_id": config["vocab_size"] - 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = 1 + 0.3 * torch.randn(8)
    save_file(tensors, folder / "model.safetensors")
    return folder
