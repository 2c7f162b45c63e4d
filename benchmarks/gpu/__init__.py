"""The engine's speed on a GPU next to the device's limit: `python -m benchmarks.gpu`."""
