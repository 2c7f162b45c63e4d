"""A model in training: its parameters, and its logits by the layers that serve it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.models.registry import Config
from bankfull.train.gradients import logits, model_with
from bankfull.train.lm.weights import initial_weights
from bankfull.weights.safetensors import COMPOSED


class TrainedModel:
    """`parameters` are all that an optimizer step changes; their names are those of the checkpoint."""

    def __init__(
        self, config: Config, seed: int, device: torch.device, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """`weights`: the parameters to start from, instead of new ones drawn by `seed`."""
        if weights is None and config.get("model_type") != COMPOSED:
            raise ModelError(
                f"Architecture {str(config.get('model_type'))[:80]!r} cannot be trained here; write it as a model of "
                f"type {COMPOSED!r}, or start from a preset."
            )
        self.config, self.device = config, device
        first = initial_weights(config, seed) if weights is None else weights
        self.parameters = {name: value.to(device).requires_grad_() for name, value in first.items()}

    def logits(self, tokens: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """(sequences, tokens, vocabulary) from ids (sequences, tokens). `parameters`: others in place of the own."""
        return logits(model_with(self.config, self.parameters if parameters is None else parameters), tokens)
