"""Ceilings of machines: measured on this one, or read from the catalogue."""
