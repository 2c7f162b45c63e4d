"""The switches of a model's chat template: reasoning on or off, and reasoning effort."""

from __future__ import annotations

from typing import Any, Literal

from bankfull.serve.api.errors import Refusal
from bankfull.text.template import ChatTemplate

THINKING = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Switches:
    """The variables that a template reads without setting them first."""

    def __init__(self, template: ChatTemplate | None) -> None:
        names = frozenset() if template is None else frozenset.intersection(*template.variables)
        self._thinking = next((name for name in THINKING if name in names), None)
        self._effort = EFFORT in names

    def thinking(self, wanted: bool, param: str) -> dict[str, Any]:
        """Template options. Without a switch reasoning cannot be requested, and is not prevented."""
        if self._thinking is not None:
            return {self._thinking: wanted}
        if wanted:
            raise Refusal(
                f"This model's chat template has no switch for {param}: leave it out.",
                param=param,
                code="unsupported_parameter",
            )
        return {}

    def effort(self, effort: str, param: str) -> dict[str, Any]:
        if self._effort:
            return {EFFORT: effort}
        if effort == "none" and self._thinking is not None:
            return {self._thinking: False}
        raise Refusal(
            f"This model's chat template has no switch for {param}: leave it out.",
            param=param,
            code="unsupported_parameter",
        )
