"""What a model over several ranks cannot do yet."""

from __future__ import annotations

from bankfull.config import RunConfig, SpeculativeChoice, StateConfig
from bankfull.errors import ConfigError

HEADS_OF_MODEL = ("medusa", "eagle", "mtp", "streaming", "tree-streaming")
"""Speculation with the model's own head, or with parts trained for it."""


def refuse_layout(run: RunConfig, state: StateConfig) -> None:
    """Refuse what a model over several ranks cannot do yet."""
    mesh, speculative = run.mesh, SpeculativeChoice.parse(run.speculative)
    if mesh.cp > 1:
        raise ConfigError(
            f"The layout {mesh} cannot be run yet, only predicted; all but cp can: parallel='tp=2,pp=2,ep=2'."
        )
    if mesh.sp != "off" and (mesh.pp > 1 or mesh.ep > 1):
        raise ConfigError(f"The layout {mesh} cannot be run yet: sp=on runs with tp alone; leave out pp and ep.")
    if mesh.pp > 1 and speculative.name not in ("off", "auto", "suffix", "ngram"):
        raise ConfigError(
            f"speculative={speculative.name} proposes drafts from hidden states, which the first of the {mesh.pp} "
            "stages does not have; use suffix or ngram."
        )
    if state.kv_host or state.kv_disk:
        raise ConfigError(
            f"KV tiers below the device need one rank, and the layout {mesh} has {mesh.ranks}; leave out one."
        )
    if speculative.name in HEADS_OF_MODEL:
        raise ConfigError(
            f"speculative={speculative.name} reads the model's head and layers, which {mesh} spreads over ranks; use "
            "suffix, ngram, lookahead or a draft model."
        )
