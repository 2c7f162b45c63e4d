"""Latent attention (MLA)."""
