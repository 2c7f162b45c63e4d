"""Benchmarks against other engines and against hardware limits: tools of the project, not part of the package."""
