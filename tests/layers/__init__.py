"""Layers on their own, without a family."""
