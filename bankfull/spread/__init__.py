"""Layers and models that several ranks compute together: they exchange tokens, heads, rows or hidden states."""
