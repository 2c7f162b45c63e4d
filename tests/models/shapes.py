"""What the models of all cases share: their sizes, and how the reference makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as tf

LENGTH = 45
"""Tokens that every test runs: over two pages, and past every window and original context below."""
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


Case = Callable[[], Any]
"""Makes the model of the reference."""


def model(kind: str, **settings: Any) -> Case:
    def make() -> Any:
        config = getattr(tf, f"{kind}Config")(**{**SIZES, **settings})
        made = getattr(tf, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        return any_width(made)

    return make


def any_width(made: Any) -> Any:
    """The default product of a mixture of experts refuses odd widths."""
    made.set_experts_implementation("eager")
    return made


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **values}
