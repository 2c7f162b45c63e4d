"""Measurements against other engines: tools of the project, not part of the package."""
