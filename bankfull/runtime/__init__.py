"""Runs a step on a device: rows, batches, captured steps and memory."""
