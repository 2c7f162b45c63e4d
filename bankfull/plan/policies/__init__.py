"""Scheduling policies side by side: one traffic, simulated or on an engine."""
