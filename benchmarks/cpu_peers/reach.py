"""The share of the machine's read bandwidth that our decoding uses: bytes from the meter, bandwidth as measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from bankfull.bench.compare.rows import Bandwidth
from bankfull.limits.machine.cpu_ceilings import LARGEST_SET, filled, read_rates
from bankfull.runtime.host import available_memory
from benchmarks.cpu_peers.works import Work

Looking = Callable[[float], Bandwidth]
"""Measures the current read bandwidth over a working set of the given bytes."""
SECONDS = 1.0
"""Seconds of reading before and after each turn."""


def bytes_per_token(model: Path, work: Work) -> float:
    """Bytes that a token in the middle of the work must read, each operand once, in our default dtype."""
    from bankfull.limits.meter.metered import MeteredModel
    from bankfull.limits.meter.step import StepShape
    from bankfull.weights.source import open_model

    step = StepShape.decode(work.requests, work.prompt_len + work.new // 2)
    return MeteredModel(open_model(model)).cost(step).sum().read / work.requests


def bandwidth_now(working_set: float) -> Bandwidth:
    buffer = _memory(int(min(working_set, LARGEST_SET, available_memory() // 4)))
    return Bandwidth(*read_rates(buffer, SECONDS))


@lru_cache(maxsize=1)
def _memory(size: int) -> Any:
    """Filled once, because the first touch is slower than reading."""
    return filled(size, budget=math.inf)
