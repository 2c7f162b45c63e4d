"""Triton kernels, registered as provider "triton" for CUDA devices. Imported only where such a device is used."""

from bankfull.ops.triton import embedding, launch, norm, pointwise, recurrent, rope

__all__ = ["embedding", "launch", "norm", "pointwise", "recurrent", "rope"]
