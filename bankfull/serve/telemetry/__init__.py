"""Logs, metrics, and the trace that each HTTP request carries."""
