"""Triton kernels, registered as provider "triton" for CUDA devices. Imported only if a CUDA device is used."""

from bankfull.ops.triton import (
    attention,
    embedding,
    launch,
    linear,
    norm,
    pages,
    pointwise,
    quantized,
    quantized_embedding,
    recurrent,
    rope,
)

__all__ = [
    "attention",
    "embedding",
    "launch",
    "linear",
    "norm",
    "pages",
    "pointwise",
    "quantized",
    "quantized_embedding",
    "recurrent",
    "rope",
]
