"""How much of the machine's read bandwidth our decoding uses: bytes from the meter, bandwidth measured beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from bankfull.bench.compare.rows import Bandwidth
from bankfull.limits.machine.ceilings import LARGEST_SET, filled, read_rates
from bankfull.runtime.device import available_memory
from benchmarks.cpu_peers.works import Work

Looking = Callable[[float], Bandwidth]
"""What this machine reads now, over and over from a working set of so many bytes."""
SECONDS = 1.0
"""Of reading, before and after a turn of seconds."""


def bytes_per_token(model: Path, work: Work) -> float:
    """What a token in the middle of the work must read, each operand once, in the dtype that we run by default."""
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
    """Filled once: a first touch takes longer than reading."""
    return filled(size, budget=math.inf)
