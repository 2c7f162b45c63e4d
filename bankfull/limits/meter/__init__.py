"""The minimum cost of a step: bytes and operations by operation, as a formula, and as a time on given ceilings."""
