"""Triton kernels, registered as provider "triton" for CUDA devices. Imported only where such a device is used."""

from bankfull.ops.triton import launch

__all__ = ["launch"]
