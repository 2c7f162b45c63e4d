"""Reasons to refuse a request when it is added: it can never run, or the queue is full."""

from __future__ import annotations

from bankfull.config import SchedConfig
from bankfull.errors import RequestError
from bankfull.state.manager import StateManager
from bankfull.types import Request


def check_request(request: Request, waiting: int, config: SchedConfig, state: StateManager) -> None:
    """`waiting`: sequences in the queue before this request's."""
    if not request.prompt:
        raise RequestError("The prompt is empty; give at least one token.")
    if request.samples < 1:
        raise RequestError(f"samples={request.samples!r} must be a whole number of at least 1.")
    if waiting + request.samples > config.max_waiting:
        raise RequestError(
            f"{waiting} sequences are waiting and {request.samples} more would exceed max_waiting="
            f"{config.max_waiting}; try again later."
        )
    if request.generates and request.limit <= len(request.prompt):
        raise RequestError(
            f"The prompt has {len(request.prompt)} tokens and the limit is {request.limit}; shorten the prompt or "
            "raise the limit so that at least one token can follow."
        )
    length = request.limit if request.generates else len(request.prompt)
    need = state.frames_for(length, config.step_tokens)
    if need > state.pages.size:
        raise RequestError(
            f"The request may grow to {length} tokens, which need {need} pages of state, but the pool has "
            f"{state.pages.size}; lower max_tokens, shorten the prompt, or give the pool more memory."
        )
