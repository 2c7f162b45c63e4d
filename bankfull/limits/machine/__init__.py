"""Ceilings of machines: measured on this one, or from the catalogue."""
