"""What a diffusion language model changes when an engine is built: its strategy, its pages and its steps."""

from __future__ import annotations

import logging
from dataclasses import replace

from bankfull.config import DiffusionChoice, RunConfig, SchedConfig, StateConfig
from bankfull.decode.diffusion import Denoising
from bankfull.decode.strategy import Strategy
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.ops.attention.body import WHOLE_SEQUENCE

log = logging.getLogger("bankfull")

LONGEST_STEP = 4096
"""Default tokens of a step at most, for a model that computes the whole sequence in each step."""
LARGEST_PAGE = 64
"""Tokens of a page at most, where a page must hold whole blocks."""


def suited_strategy(model: Decoder, strategy: Strategy, run: RunConfig) -> Strategy:
    """The given strategy, or denoising for a diffusion model."""
    if isinstance(strategy, Denoising) or model.diffusion is None:
        return strategy
    denoising = Denoising(DiffusionChoice.parse(run.diffusion))
    if denoising.choice.cache == "block":
        log.warning("cache=block is lossy: known tokens keep the state that they had beside other tokens.")
    return denoising


def suited_state(model: Decoder, state: StateConfig) -> StateConfig:
    """Pages that hold whole blocks, so that a page's tokens determine its state; else no prefix cache. A model that
    sees the whole sequence has no state that another sequence could use."""
    if model.diffusion is None or not state.prefix_cache:
        return state
    block = model.diffusion.block
    if state.page_tokens % block == 0:
        return state
    if block <= LARGEST_PAGE and block % state.page_tokens == 0:
        return replace(state, page_tokens=block)
    if block != WHOLE_SEQUENCE:
        log.warning(f"no prefix cache: pages of {state.page_tokens} tokens do not hold whole blocks of {block}.")
    return replace(state, prefix_cache=False)


def suited_steps(model: Decoder, sched: SchedConfig, asked: int, max_len: int | None) -> SchedConfig:
    """Steps that hold a whole sequence where the model needs it. `asked`: the user's step_tokens, 0 = none."""
    if model.diffusion is None:
        return sched
    block = model.diffusion.block
    if block == WHOLE_SEQUENCE:
        longest = min(max_len or model.max_positions, LONGEST_STEP)
        return sched if asked else replace(sched, step_tokens=max(sched.step_tokens, longest))
    if sched.step_tokens < block:
        raise ConfigError(
            f"step_tokens={sched.step_tokens} is less than the {block} tokens of the model's blocks; raise it."
        )
    return sched
