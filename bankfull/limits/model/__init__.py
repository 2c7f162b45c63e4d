"""A model without its weights: memory, step times, batch sizes and variants on any machine."""
