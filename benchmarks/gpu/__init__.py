"""What this engine reaches on a GPU, beside what the device could do: `python -m benchmarks.gpu`."""
