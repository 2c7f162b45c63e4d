"""Triton kernels, registered as provider "triton" for CUDA devices. Imported only where such a device is used."""

from bankfull.ops.triton import launch, pointwise

__all__ = ["launch", "pointwise"]
