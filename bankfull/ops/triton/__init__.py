"""Triton kernels, registered as provider "triton" for CUDA devices. Imported only where such a device is used."""

from bankfull.ops.triton import attention, embedding, launch, norm, pages, pointwise, recurrent, rope

__all__ = ["attention", "embedding", "launch", "norm", "pages", "pointwise", "recurrent", "rope"]
