"""Values that threads compute ahead of the one that reads them, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from bankfull.runtime.host import usable_cores

T = TypeVar("T")


def ahead(calls: Iterable[Callable[[], T]], workers: int | None = None) -> Iterator[T]:
    """The results of the calls, in their order. At most `workers` (one per core) and two more are under way or wait."""
    count = workers or usable_cores()
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) > count + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
