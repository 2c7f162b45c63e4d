"""Bytes and operations of a step, counted by running the model's own code on tensors without data."""
