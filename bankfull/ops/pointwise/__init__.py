"""Activations, gates and columns."""
