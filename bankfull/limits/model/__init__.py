"""What a model needs on any machine: memory, times, batch sizes, variants."""
