"""Norms and residual adds."""
