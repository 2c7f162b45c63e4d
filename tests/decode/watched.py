"""A mixin for drafters with layers of their own: keeps what those layers compute for the target model's tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Watched:
    """Comes before the strategy among the base classes."""

    def attach(self, steps: Any) -> None:
        super().attach(steps)  # type: ignore[misc]
        self.followed: list[Tensor] = []
        self._run = steps.run

    def follow(self, step: Any) -> None:
        def watched(batch: Any) -> Tensor:
            self.followed.append(self._run(batch).clone())
            return self.followed[-1]

        steps: Any = self._steps  # type: ignore[attr-defined]
        steps.run = watched
        super().follow(step)  # type: ignore[misc]
        steps.run = self._run
