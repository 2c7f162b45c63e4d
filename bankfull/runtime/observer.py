"""Observation of a runner: context managers around its launched work and around the model's head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol, TypeVar

from torch import Tensor

from bankfull.decode.strategy import LogitsHead

T = TypeVar("T")


class RunObserver(Protocol):
    def around_launch(self) -> AbstractContextManager[None]:
        """Entered and left by each launched work while it runs, in the device's order."""
        ...

    def around_drafting(self) -> AbstractContextManager[None]:
        """Entered and left where the strategy drafts, within launched work."""
        ...

    def around_head(self) -> AbstractContextManager[None]:
        """Entered and left by each call of the model's head outside of a captured step."""
        ...


def observed(work: Callable[[], T], observers: Sequence[RunObserver]) -> Callable[[], T]:
    def run() -> T:
        with ExitStack() as stack:
            for observer in observers:
                stack.enter_context(observer.around_launch())
            return work()

    return run


@contextmanager
def drafting(observers: Sequence[RunObserver]) -> Iterator[None]:
    """Around the work of a strategy that drafts."""
    with ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer.around_drafting())
        yield


class ObservedHead:
    def __init__(self, head: LogitsHead, observers: Sequence[RunObserver]) -> None:
        self._head, self._observers = head, observers

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._observed(lambda: self._head(hidden))

    def best(self, hidden: Tensor) -> Tensor:
        return self._observed(lambda: self._head.best(hidden))

    def _observed(self, work: Callable[[], Tensor]) -> Tensor:
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.around_head())
            return work()
