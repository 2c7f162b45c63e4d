"""Checks of the tokens that the samples of a request have generated on another engine, before they are continued."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.errors import RequestError
from bankfull.sample.params import SamplingParams
from bankfull.types import Finish, Request


def checked_generated(
    generated: Sequence[Sequence[int]], finished: Sequence[int], params: SamplingParams, generates: bool, vocab: int
) -> tuple[tuple[tuple[int, ...], ...], frozenset[int]]:
    """The tokens of each sample and the numbers of the finished samples; both empty if nothing was generated yet."""
    if not any(generated) and not finished:
        return (), frozenset()
    if not generates:
        raise RequestError(
            "A request without generated tokens (embedding, max_tokens=0) cannot be continued: submit it anew."
        )
    if len(generated) != params.n:
        raise RequestError(
            f"generated has the tokens of {len(generated)} samples but n is {params.n}: give one list for each sample, "
            "an empty one for a sample without tokens."
        )
    ended = frozenset(finished)
    if len(ended) < len(finished) or not ended <= set(range(params.n)):
        raise RequestError(
            f"finished is {list(finished)!r}: give each finished sample's number once, from 0 to {params.n - 1}."
        )
    if len(ended) == params.n:
        raise RequestError(
            "All samples are listed in finished, so nothing is left to continue: do not submit the request."
        )
    if params.seed is None and not params.greedy:
        raise RequestError(
            "A sampled request can only be continued with the seed of its first tokens: set seed, or temperature=0."
        )
    for number, tokens in enumerate(generated):
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(
                    f"Token {token!r} of sample {number} in generated is not an id of this model; ids go from 0 to "
                    f"{vocab - 1}."
                )
    return tuple(map(tuple, generated)), ended


def end_of(request: Request, number: int) -> Finish | None:
    """How the generated tokens of a sample end it by themselves; None if the sample goes on after them."""
    tokens = request.generated[number]
    most = request.limit - len(request.prompt)
    if len(tokens) > most:
        raise RequestError(
            f"Sample {number} in generated has {len(tokens)} tokens but the request allows {most}: submit it with the "
            "max_tokens and the context length of the engine that generated them."
        )
    for place, token in enumerate(tokens, 1):
        if token in request.stop_ids:
            if place < len(tokens):
                raise RequestError(
                    f"Token {place} of sample {number} in generated ends the sample (id {token}), but {len(tokens)} "
                    "tokens are given: remove those after the end, and list the sample in finished."
                )
            return Finish.STOP
    return Finish.LENGTH if len(tokens) == most else None
