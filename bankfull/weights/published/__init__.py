"""Quantized checkpoints as others publish them, read as tensors in our schemes."""
