"""The kernels for NVIDIA GPUs."""
