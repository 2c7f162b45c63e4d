"""The torch bodies: each one defines the meaning of its operation."""
