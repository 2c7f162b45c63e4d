"""Round-to-nearest quantization, inverse to `dequantize` up to half a quantization step.

For measuring the cost of a weight type, and for shrinking models without calibration data. Each scheme has its own
encoder (`formats`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.errors import ConfigError, ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor

ELEMENTS_AT_ONCE = 1 << 18
"""Bounds the working memory, several times the size of the values, so that it stays in the CPU's caches."""
ON_A_GPU = 1 << 26
"""The same on a GPU, where each check synchronizes, so that most matrices should be one chunk."""
TYPES = tuple(name for name, scheme in SCHEMES.items() if scheme.is_encoded)


def quantize(tensor: Tensor, name: str) -> QTensor:
    """`tensor` (..., columns) in the scheme `name`, on the same device; blocks run along the columns."""
    if name not in TYPES:
        raise ConfigError(f"Weights cannot be quantized to {name!r}; use one of {', '.join(TYPES)}.")
    scheme = SCHEMES[name]
    columns = tensor.shape[-1] if tensor.dim() else 1
    if columns % scheme.block:
        raise ModelError(
            f"A tensor of shape {tuple(tensor.shape)} cannot be stored as {name}, whose blocks are {scheme.block} "
            "columns wide; choose a type with narrower blocks."
        )
    width = columns if scheme.is_by_row else scheme.block
    blocks = tensor.detach().to(torch.float32).reshape(-1, width)
    shape = tuple(tensor.shape)
    parts = scheme.empty(shape, tensor.device)
    flat = [parts[part.name].view(-1, width // scheme.block * part.per_block + part.per_row) for part in scheme.parts]
    encode = scheme.encode if scheme.encoder_of is None else scheme.encoder_of(blocks)
    assert encode is not None
    chunk = max(1, (ON_A_GPU if tensor.is_cuda else ELEMENTS_AT_ONCE) // width)
    for at in range(0, len(blocks), chunk):
        part = blocks[at : at + chunk]
        if not bool(part.isfinite().all()):
            raise ModelError(f"A tensor with values that are not finite cannot be stored as {name}.")
        for stored, encoded in zip(flat, encode(part), strict=True):
            stored[at : at + chunk] = encoded
    return QTensor(scheme, parts, shape)
