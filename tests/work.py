"""Work that is counted, for tests of what something costs: a count is the same on a busy machine and on an idle one."""

from __future__ import annotations

from collections.abc import Callable
from cProfile import Profile


def work_of(job: Callable[[], object]) -> int:
    """The calls that `job` makes on this thread, of functions written in Python or in C. The profiler counts in C: a
    callback in Python takes most of the time of the tests that count."""
    profile = Profile()
    profile.enable()
    try:
        job()
    finally:
        profile.disable()
    return sum(entry.callcount for entry in profile.getstats())
