"""Replicas on one or more machines: Ray places, watches and restarts them; requests never pass through Ray."""
