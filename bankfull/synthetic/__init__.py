"""Models of real shapes with random weights: for tests, benchmarks, and trying an architecture without its weights."""
