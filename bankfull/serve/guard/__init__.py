"""Connections, TLS, API keys, and the checks that a request passes before an endpoint handles it."""
