"""Runs a step on a device: rows, batches, captured steps, memory, and a fake device for tests."""
