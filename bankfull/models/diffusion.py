"""What the families of diffusion language models share: the mask token and the attention of their layers."""

from __future__ import annotations

from dataclasses import replace

from bankfull.errors import ModelError
from bankfull.layers.attention import Heads
from bankfull.layers.decoder import Decoder, MaskedDiffusion
from bankfull.models.fields import ConfigFields
from bankfull.ops.attention.body import WHOLE_SEQUENCE


def seeing_blocks(heads: Heads, block: int = WHOLE_SEQUENCE) -> Heads:
    """Heads whose tokens see each other within a block, by default in both directions over the whole sequence."""
    return replace(heads, block=block)


def denoising(model: Decoder, fields: ConfigFields, block: int = WHOLE_SEQUENCE, *, shifted: bool = False) -> Decoder:
    """The same model, marked as one that predicts masked tokens."""
    mask = fields.size("mask_token_id")
    if mask >= model.vocab:
        raise ModelError(
            f"The model's configuration has mask_token_id = {mask}, but its vocabulary has {model.vocab} tokens; use "
            "the configuration that belongs to the file."
        )
    model.diffusion = MaskedDiffusion(mask, block, shifted)
    return model
