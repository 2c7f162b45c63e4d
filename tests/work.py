"""Work that is counted, for tests of what something costs: a count is the same on a busy machine and on an idle one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

CALLS = ("call", "c_call")
"""The events of a profile that count: a function is entered, written in Python or in C."""


def work_of(job: Callable[[], object]) -> int:
    """The calls that `job` makes on this thread."""
    done = 0

    def note(frame: FrameType, event: str, called: object) -> None:
        nonlocal done
        done += event in CALLS

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(before)
    return done
