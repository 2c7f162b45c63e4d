"""A composed model in training: the same layers as the served one, over whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from bankfull.errors import ModelError
from bankfull.layers.mlp import activation
from bankfull.models.blocks import LayerPlan, plans_of
from bankfull.models.fields import ConfigFields
from bankfull.models.kinds import DEFAULTS, FeedShape
from bankfull.models.registry import Config
from bankfull.ops import activate, activate_mul, expert_mlp, rms_norm, route
from bankfull.train.lm.mixers import MIXERS, SequencePass
from bankfull.train.lm.weights import Weights, initial_weights
from bankfull.weights.qtensor import QTensor
from bankfull.weights.safetensors import COMPOSED


class TrainedModel:
    """`parameters` are all that an optimizer step changes; their names are those of the checkpoint."""

    def __init__(
        self, config: Config, seed: int, device: torch.device, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """`weights`: the parameters to start from, instead of new ones drawn by `seed`."""
        if config.get("model_type") != COMPOSED:
            raise ModelError(
                f"Architecture {str(config.get('model_type'))[:80]!r} cannot be trained here; write it as a model of "
                f"type {COMPOSED!r}, or start from a preset."
            )
        fields = ConfigFields(config, DEFAULTS)
        self.config, self.device = config, device
        self.eps, self.hidden, self.vocab = (
            fields.number("rms_norm_eps"),
            fields.size("hidden_size"),
            fields.size("vocab_size"),
        )
        self.theta = fields.number("rope_theta")
        if fields.object_or_none("rope_scaling") is not None:
            raise ModelError("A model with 'rope_scaling' cannot be trained here; leave it out of the configuration.")
        self.plans = plans_of(config)
        first = initial_weights(config, seed) if weights is None else weights
        self.parameters = {name: value.to(device).requires_grad_() for name, value in first.items()}

    def logits(self, tokens: Tensor, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
        """(sequences, tokens, vocabulary) from ids (sequences, tokens). `parameters`: others in place of the own."""
        w = Weights(self.parameters if parameters is None else parameters)
        x = w["model.embed_tokens.weight"][tokens]
        run = SequencePass(torch.arange(tokens.shape[1], device=self.device), self.eps, self.theta, len(self.plans))
        for layer, plan in enumerate(self.plans):
            x = self._layer(w.at("model").at("layers").at(layer), x, plan, run, layer)
        x = self._normed(x, w.at("model"), "norm")
        table = w.get("lm_head.weight")
        return linear(x, w["model.embed_tokens.weight"] if table is None else table)

    def _layer(self, w: Weights, x: Tensor, plan: LayerPlan, run: SequencePass, layer: int) -> Tensor:
        inner = self._normed(x, w, "mixer_norm")
        places = [w.at("mixer")] if len(plan.mixers) == 1 else [w.at("mixer").at(i) for i in range(len(plan.mixers))]
        for at, mixer in zip(places, plan.mixers, strict=True):
            x = x + MIXERS[mixer.kind](at, inner, mixer.shape, run, layer)
        if plan.feed.kind == "none":
            return x
        return x + FEEDS[plan.feed.kind](w.at("feed"), self._normed(x, w, "feed_norm"), plan.feed)

    def _normed(self, x: Tensor, w: Weights, name: str) -> Tensor:
        normed: Tensor = rms_norm(x, w[f"{name}.weight"], self.eps)
        return normed


def gated_feed(w: Weights, x: Tensor, shape: FeedShape) -> Tensor:
    kind = activation(shape.activation)
    return w.linear("down_proj", activate_mul(w.linear("gate_proj", x), w.linear("up_proj", x), kind))


def _dense(w: Weights, x: Tensor, shape: FeedShape) -> Tensor:
    return w.linear("down_proj", activate(w.linear("up_proj", x), activation(shape.activation)))


def _experts(w: Weights, x: Tensor, shape: FeedShape) -> Tensor:
    assert shape.rule is not None
    rows, names = x.flatten(0, 1), [f"experts.{i}" for i in range(shape.rule.experts)]
    weights, chosen = route(w.linear("gate", rows), None, shape.rule)
    gate, up, down = (
        QTensor.dense(torch.stack([w[f"{name}.{matrix}_proj.weight"] for name in names]))
        for matrix in ("gate", "up", "down")
    )
    y = expert_mlp(rows, chosen, weights, gate, up, down, None, None, None, activation(shape.activation))
    return (y + gated_feed(w.at("shared_expert"), rows, shape) if shape.shared else y).view_as(x)


FEEDS: dict[str, Callable[[Weights, Tensor, Any], Tensor]] = {
    "gated": gated_feed,
    "dense": _dense,
    "experts": _experts,
}
