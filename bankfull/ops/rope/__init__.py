"""RoPE."""
