"""The expected output of every request, computed without an engine.

The identity of a prefix stands for the state that a model would have after it: a rolling hash of the salt and all
tokens so far. The next token is a function of that identity and the sample's number, so neither batching nor
preemption nor reuse may change an output.
"""

from __future__ import annotations

from bankfull.types import Finish, Request

EMPTY = 0
"""Content of slot 0: the initial state, the same for every salt."""


def root(salt: bytes) -> int:
    return hash((7, int.from_bytes(salt, "big"), len(salt)))


def extend(identity: int, token: int) -> int:
    return hash((identity, token))  # hashes of integers are the same in every process


def next_token(identity: int, child: int, vocab: int) -> int:
    return (hash((identity, child, 1)) >> 7) % vocab


def identities(salt: bytes, tokens: tuple[int, ...] | list[int]) -> list[int]:
    """Entry i is the identity of the first i + 1 tokens."""
    known, identity = [], root(salt)
    for token in tokens:
        identity = hash((identity, token))
        known.append(identity)
    return known


def expected(request: Request, child: int, vocab: int) -> tuple[list[int], Finish]:
    """The tokens of sample `child` of a request, and why it ends."""
    if not request.generates:
        return [], Finish.STOP
    identity = identities(request.salt, request.prompt)[-1]
    tokens: list[int] = []
    while True:
        token = next_token(identity, child, vocab)
        tokens.append(token)
        if token in request.stop_ids:
            return tokens, Finish.STOP
        if len(request.prompt) + len(tokens) >= request.limit:
            return tokens, Finish.LENGTH
        identity = extend(identity, token)
