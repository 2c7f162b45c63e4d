"""Runs cases, in this process or in several. Apart from `__main__`, which a new process does not import."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from tests.trial.drawing import draw
from tests.trial.trial import Report, run_case

CHUNK = 20
"""Cases of which a process reports at once."""


def reports(first: int, cases: int, workers: int) -> Iterator[list[Report]]:
    chunks = [range(at, min(at + CHUNK, first + cases)) for at in range(first, first + cases, CHUNK)]
    if workers == 1:
        yield from map(_run, chunks)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=prepare) as pool:
        yield from pool.map(_run, chunks)


def prepare() -> None:
    torch.set_num_threads(1)
    logging.getLogger("bankfull").setLevel(logging.ERROR)


def _run(numbers: range) -> list[Report]:
    return [run_case(draw(number)) for number in numbers]
