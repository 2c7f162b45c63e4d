"""Passes with gradients through the layers that serve: a model over whole sequences, as a function of its parameters.

Parameters are tensors by the names of a checkpoint. What layers derive from them (reordered rows, decays from their
logarithms, stacked experts) is a part of the function, so a model is built for each pass: that copies no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import Config, build_model
from bankfull.ops import training_kit
from bankfull.ops.train.kept import KeptRows
from bankfull.runtime.batch import whole_batch
from bankfull.runtime.forward import Model, plan_mixers
from bankfull.state.spec import Layout, layout_of
from bankfull.state.storage import LayerStates
from bankfull.weights.given_source import GivenTensors


def training_build(parameters: Mapping[str, Tensor]) -> Build:
    """Builds layers with these parameters, in their dtype and on their device."""
    first = next(iter(parameters.values()))
    return Build(GivenTensors(parameters), training_kit(first.device.type), first.dtype, first.device)


def model_with(config: Config, parameters: Mapping[str, Tensor]) -> Decoder:
    """The model of a configuration for a pass with gradients to these parameters."""
    return build_model(config, training_build(parameters))


def hidden_states(model: Model, tokens: Tensor, positions: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """(sequences * tokens, hidden) what the head of a model of `model_with` reads, for token ids (sequences, tokens).
    `positions`: (tokens) those of each sequence's tokens, if they are not in order. `seen`: as in `KeptRows`."""
    layout = layout_of(model.states(), 1)
    batch = whole_batch(layout, tokens, positions)
    return model.forward(batch, kept_states(layout, seen), plan_mixers(model, layout, batch))


def logits(model: Model, tokens: Tensor, positions: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """(sequences, tokens, vocabulary); arguments as of `hidden_states`."""
    scores: Tensor = model.head(hidden_states(model, tokens, positions, seen))
    return scores.unflatten(0, tokens.shape)


def kept_states(layout: Layout, seen: Tensor | None = None) -> Sequence[LayerStates]:
    """What the layers of a pass keep: keys and values of their own rows, and no state of recurrences."""
    states: dict[Any, dict[str, Any]] = {}
    for group in layout.paged:
        states |= {member: {spec.name: KeptRows(seen) for spec in group.tensors} for member in group.members}
    if layout.recurrent is not None:
        for member, specs in zip(layout.recurrent.members, layout.recurrent.tensors, strict=True):
            states[member] = dict.fromkeys((spec.name for spec in specs), _NO_STATE)
    return [tuple(states[owner] for owner in owners) for owners in layout.owners]


_NO_STATE: Any = object()
