"""Layouts of one model over several ranks: bytes on the wire, memory per rank, time of collectives."""
