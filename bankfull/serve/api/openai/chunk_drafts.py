"""The draft tokens of a step in a streamed chat (`stream_options.include_drafts`, an extension)."""

from __future__ import annotations

import msgspec

from bankfull.outputs import Delta
from bankfull.text.tokenizer import Tokenizer
from bankfull.types import StepDrafts


class ChunkDrafts(msgspec.Struct):
    """The tokens of one step, on its first chunk: accepted drafts, then the sampled token, which replaces the first
    rejected draft."""

    tokens: list[str]
    accepted: int
    rejected: list[str]
    verified: int
    """Draft tokens that the step verified, accepted or not."""


def chunk_drafts(delta: Delta, drafts: StepDrafts, tokenizer: Tokenizer) -> ChunkDrafts:
    tokens, rejected = ([tokenizer.token_text(id) for id in ids] for ids in (delta.token_ids, drafts.rejected))
    return ChunkDrafts(tokens, drafts.accepted, rejected, drafts.verified)
