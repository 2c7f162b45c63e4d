"""How much of the machine's read bandwidth our decoding uses: bytes from the meter, bandwidth measured beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.cpu_peers.works import Work

Bandwidth = Callable[[float], float]
"""Bytes per second that this machine reads now, over and over from a working set of so many bytes."""


def bytes_per_token(model: Path, work: Work) -> float:
    """What a token in the middle of the work must read, each operand once, in the dtype that we run by default."""
    from bankfull.limits.metered import MeteredModel
    from bankfull.limits.step import StepShape
    from bankfull.weights.source import open_model

    step = StepShape.decode(work.requests, work.prompt_len + work.new // 2)
    return MeteredModel(open_model(model)).cost(step).sum().read / work.requests


def bandwidth_now(working_set: float) -> float:
    from bankfull.limits.ceilings import measure

    return measure(refresh=True).read_at(working_set)
