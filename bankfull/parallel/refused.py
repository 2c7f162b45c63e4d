"""What a model over several ranks cannot do yet."""

from __future__ import annotations

from bankfull.config import RunConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.models.registry import Config, family_of, rank_config, stages_of
from bankfull.speculation import SpeculativeChoice


def refuse_layout(run: RunConfig, state: StateConfig, config: Config) -> None:
    """Refuse what a model over several ranks cannot do yet, and sizes that do not divide, before a rank is started."""
    mesh, speculative = run.mesh, SpeculativeChoice.parse(run.speculative)
    named = speculative.then or speculative
    if mesh.pp > 1 and speculative.way.reads_hidden:
        raise ConfigError(
            f"speculative={speculative.name} proposes drafts from hidden states, which the first of the {mesh.pp} "
            "stages does not have; use suffix or ngram."
        )
    if (state.kv_host or state.kv_disk) and mesh.page_ranks > 1:
        raise ConfigError(
            f"kv_host and kv_disk give each rank its part of every page, but {mesh} deals whole pages out to ranks; "
            "use tp, pp or sp=ulysses, or leave out the tiers."
        )
    if named.way.runs_top_layers:
        raise ConfigError(
            f"speculative={named.name} runs streams through the model's top layers, which the layout {mesh} spreads "
            "over ranks; use suffix, ngram, lookahead, medusa, eagle or a draft model."
        )
    if run.ray is not None and run.device != "cpu":
        raise ConfigError(
            f"ray={run.ray!r} places ranks on CPUs only: rank 0 runs outside of Ray, which may give its GPU to another "
            "rank; leave ray out, or serve the model with --replicas 1 and --ray."
        )
    family_of(config)
    if mesh.tp > 1 or mesh.ffn:
        rank_config(config, mesh.tp, mesh.feed_tp, mesh.ep > 1)
    stages_of(config, mesh.pp)
