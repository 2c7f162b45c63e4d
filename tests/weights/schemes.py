"""A tiny model whose matrices fit every storage scheme, and its matrices in each of them."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from bankfull.weights.formats import READ_ONLY, SCHEMES
from bankfull.weights.formats.two_of_four import SCHEMES as SPARSE
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import TensorSource, open_model

QUANTIZED = [scheme.name for scheme in (SCHEMES | READ_ONLY).values() if not scheme.is_dense and scheme not in SPARSE]


@lru_cache
def folder() -> Path:
    """Wide enough for every scheme's blocks, with biases, in bfloat16."""
    made = Path(tempfile.mkdtemp(prefix="bankfull-schemes-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    torch.manual_seed(2)
    config = transformers.Qwen2Config(
        vocab_size=70,
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.1 if weight.dim() > 1 or "bias" in name else 0.2))
    model.save_pretrained(made)
    return made


class InScheme:
    """The model's inner matrices in one storage scheme."""

    def __init__(self, source: TensorSource, name: str) -> None:
        self.source, self.name = source, name
        self.names, self.has, self.shape = source.names, source.has, source.shape
        self.unread, self.release = source.unread, source.release

    def scheme(self, name: str) -> Any:
        wanted = is_inner_matrix(self.source, name)
        return (SCHEMES | READ_ONLY)[self.name] if wanted else self.source.scheme(name)

    def get(self, name: str) -> QTensor:
        found, scheme = self.source.get(name), self.scheme(name)
        if found.scheme == scheme:
            return found
        return in_scheme(self.name, name)


@lru_cache(maxsize=16)
def in_scheme(kind: str, name: str) -> QTensor:
    found, scheme = open_model(folder()).source.get(name), (SCHEMES | READ_ONLY)[kind]
    if kind in SCHEMES:
        return quantize(found.dequantize(), kind)
    parts = scheme.empty(found.shape)
    random = torch.Generator().manual_seed(len(name))
    (blocks,) = parts.values()
    blocks.random_(0, 256, generator=random)
    by_block = blocks.view(*found.shape[:-1], -1, scheme.block_bytes)
    if kind == "mxfp4":
        by_block[..., 0] = 122  # a scale of 1/32
    else:
        by_block[..., :2] = torch.tensor([0.002], dtype=torch.float16).view(torch.uint8)
        if kind == "iq1_m":  # its scale is spread over other bytes
            by_block[..., -8:] = 0x20
    return QTensor(scheme, parts, found.shape)
