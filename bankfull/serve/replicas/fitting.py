"""Whether an engine can serve beside the others of a set."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.fleet.reports import Facts

OTHER_WEIGHTS = (
    "The model was updated while the request was running, and no replica has the weights of before; ask again."
)


ROUNDED = "pages keep their bits when they are handed over, and are not rounded again"


def misfit(name: str, facts: Facts, same: Sequence[Facts | None], others: Sequence[Facts | None]) -> str:
    """Why a replica cannot serve beside the others, in one sentence; empty if it can. `same`: those of `others` that
    must have the same weights."""
    if (peer := next(filter(None, same), None)) is not None:
        return _difference(name, facts, peer, same_weights=True)
    other = next(filter(None, others), None)
    return "" if other is None else _difference(name, facts, other, same_weights=False)


def _difference(name: str, facts: Facts, others: Facts, *, same_weights: bool) -> str:
    """Why a replica cannot serve beside the others, in one sentence; empty if it can."""
    for what, own, usual in (
        *([("serves the model", facts.name, others.name)] if same_weights else ()),
        ("has a vocabulary of size", facts.vocab, others.vocab),
        ("has a context in tokens of", facts.max_len, others.max_len),
    ):
        if own != usual:
            return f"Replica {name} {what} {own}, the others {usual}: start it with the same model and options."
    if same_weights and facts.weights != others.weights:
        return (
            f"Replica {name} has loaded other weights of {facts.name} than the others: its files have changed; load "
            "them in all replicas with `bankfull cluster update`."
        )
    return ""


def state_misfit(name: str, facts: Facts, others: Facts | None) -> str:
    """Why a replica cannot exchange state with the engines of the other pool, in one sentence; empty if it can."""
    if others is None:
        return ""
    # What a person has chosen comes before what follows from it.
    for what in dict.fromkeys(("model", "dtype", "quantize", *facts.state, *others.state)):
        own, usual = facts.state.get(what, "none"), others.state.get(what, "none")
        if own != usual:
            why = ROUNDED if what == "KV dtype" else "pages cannot be handed over between them"
            return (
                f"Engine {name} keeps its state with {what} {own}, those of the other pool of --separate with {usual}: "
                f"{why}; start both with the same model and options."
            )
    return ""


def border_of(facts: Facts) -> int:
    """State is handed over at multiples of this many tokens, where pages of every group end."""
    return facts.snapshots or max((page for page, _ in facts.groups), default=facts.page_tokens)


def handed_length(facts: Facts, prompt_len: int) -> int:
    """Tokens of a prompt whose state can be handed over (as `state.expected.shipped_length` in the engine)."""
    border = border_of(facts)
    return (prompt_len - 1 if facts.snapshots else prompt_len) // border * border if border else 0
