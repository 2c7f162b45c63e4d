"""The engine's reports about the requests that it begins to work on, for a front that resumes them elsewhere.

A request whose work ends every engine must be given up. A request that only waited in the queue of an engine that has
ended must not. The front cannot tell them apart from the tokens, so the engine reports before it begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from bankfull.serve.engine.wire import Begun

if TYPE_CHECKING:
    from bankfull.engine import Engine
    from bankfull.types import StepPlan

T = TypeVar("T")


class BeginReporter:
    def __init__(self, engine: Engine[Any], say: Callable[[Begun], None]) -> None:
        """`say` must write before it returns, from any thread: the work that follows may end the process."""
        self._say = say
        engine.on_launch.append(self._launched)

    def preparing(self, request: int, prepare: Callable[[], T]) -> Callable[[], T]:
        """The same work, reported: a grammar may end its compiler."""

        def reported() -> T:
            self._say(Begun([request]))
            prepared = prepare()
            self._say(Begun([request], waits=True))
            return prepared

        return reported

    def _launched(self, plan: StepPlan) -> None:
        if plan.enter:
            self._say(Begun(list({cast(int, enter.request) for enter in plan.enter}), runs=True))
