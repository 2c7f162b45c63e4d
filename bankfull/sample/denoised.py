"""Sampling parameters that a diffusion model does not take."""

from __future__ import annotations

from bankfull.errors import RequestError
from bankfull.sample.params import SamplingParams


def refuse_beside_denoising(params: SamplingParams, pool: str | None) -> None:
    """Raises RequestError naming what needs tokens in their order: a diffusion model fixes them in any order."""
    named = {
        "structured": params.structured is not None,
        "logprobs": params.logprobs is not None,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "bad_words": bool(params.bad_words or params.bad_word_ids),
        "min_tokens": params.min_tokens > 0,
        "include_drafts": params.include_drafts,
        "an embedding": pool is not None,
    }
    for name, given in named.items():
        if given:
            raise RequestError(
                f"A diffusion model does not support {name}: it fixes tokens in any order, not one after the other; "
                "leave it out, or use a model that predicts the next token."
            )
