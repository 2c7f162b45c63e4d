"""Decoding strategies: propose draft tokens, verify them, accept a prefix."""
