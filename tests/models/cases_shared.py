"""Tiny models whose layers share keys and values. The reference has no such models: its projections of keys and values
are replaced by the results of their owner's, which is all that sharing means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 41,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Reused(torch.nn.Module):
    """Returns what another module returned in the same pass."""

    def __init__(self, owner: torch.nn.Module) -> None:
        super().__init__()
        self.last: list[torch.Tensor] = []
        owner.register_forward_hook(self._keep)

    def _keep(self, module: Any, args: Any, result: torch.Tensor) -> None:
        self.last = [result]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last[0]


def share(model: Any, factor: int) -> Any:
    """Every `factor`-th layer computes keys and values; the layers after it share them."""
    for number, layer in enumerate(model.model.layers):
        if number % factor:
            owner = model.model.layers[number - number % factor].self_attn
            layer.self_attn.k_proj, layer.self_attn.v_proj = Reused(owner.k_proj), Reused(owner.v_proj)
    return model


def hunyuan(factor: int = 1, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        cla = {"use_cla": True, "cla_share_factor": factor} if factor > 1 else {}
        config = tf.HunYuanDenseV1Config(**{**SIZES, **cla, **settings})
        return share(tf.HunYuanDenseV1ForCausalLM(config), factor)

    return make


CASES: dict[str, Callable[[], Any]] = {
    "hunyuan-v1-dense": hunyuan(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
    ),
    "hunyuan-shared": hunyuan(2),
    "hunyuan-shared-biased": hunyuan(3, attention_bias=True, tie_word_embeddings=True),
}
