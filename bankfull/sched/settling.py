"""What the tokens of a settled step mean for one sequence."""

from __future__ import annotations

from bankfull.sched.sequence import Sequence
from bankfull.state.manager import StateManager
from bankfull.types import Finish, Output


def settle_sequence(seq: Sequence, step: int, tokens: list[int], output: Output, state: StateManager) -> None:
    """Appends the tokens that `seq` keeps, commits its state, and notes in `output` whether it ends."""
    assert seq.state is not None
    request = seq.request
    for token in tokens:
        seq.tokens.append(token)
        output.tokens.append(token)
        if token in request.stop_ids:
            output.finish = Finish.STOP
            break
        if len(seq.tokens) >= request.limit:
            output.finish = Finish.LENGTH
            break
    # Drafts behind an end are not part of the sequence, though the device has accepted them.
    accepted = min(len(tokens) - 1, len(output.tokens)) if tokens else 0
    seq.land(accepted)
    # A row that ends may have one more step in flight, which reads the slot that the device has accepted.
    last_use = step if output.finish is None else state.launched
    state.commit(seq.state, last_use, accepted)
    if seq.computed >= seq.state.border:
        state.publish(seq.state, seq.tokens, seq.computed, seq.prompt_len)
    if not request.generates and seq.computed >= seq.prompt_len:
        output.finish = Finish.STOP
