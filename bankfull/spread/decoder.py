"""A model of which this rank computes a part: some tokens of each step, some of the layers, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.ops import add, receive_rows, send_rows
from bankfull.ranks.stage import Stage
from bankfull.spread.token_share import TokenShare
from bankfull.state.spec import Shared, StateSpec
from bankfull.state.storage import LayerStates


@dataclass(slots=True)
class RankDecoder(Decoder):
    """`blocks` are this rank's. `states` are the whole model's, because pages are planned for all layers."""

    first: int = 0
    """The number of the first block."""
    share: TokenShare | None = None
    """The tokens that this rank computes between mixers; None: all."""
    all_states: list[tuple[StateSpec, ...]] | None = None
    """Those of all layers; None: `blocks` are all layers."""

    @staticmethod
    def of(model: Decoder, **changed: Any) -> RankDecoder:
        known = {one.name: getattr(model, one.name) for one in fields(model) if one.init}
        return RankDecoder(**{**known, **changed})

    def states(self) -> list[tuple[StateSpec, ...]]:
        return Decoder.states(self) if self.all_states is None else self.all_states

    def enter(self, batch: Batch) -> tuple[Batch, Tensor]:
        if self.share is None:
            return batch, self.embed(batch)
        own = self.share.own(batch)
        return own, self.share.enter(self.embed(own))

    def leave(self, x: Tensor, batch: Batch) -> Tensor:
        return x if self.share is None else self.share.leave(x, batch)

    def best(self, batch: Batch, states: Sequence[LayerStates], metas: Sequence[Any]) -> Tensor:
        if self.share is not None:
            return self.head.best(self.forward(batch, states, metas))
        return Decoder.best(self, batch, states, metas)


class Passed:
    """Takes the place of the last norm: the stream goes to the next stage."""

    def __init__(self, build: Build, stage: Stage) -> None:
        self._add, self._send, self._after = build.bind(add), build.bind(send_rows), stage.after

    def __call__(self, x: Tensor) -> Tensor:
        sent: Tensor = self._send(x, self._after)
        return sent

    def join(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if delta is None else self._add(x, delta)
        return x, self(x)


def staged(model: Decoder, build: Build, stage: Stage) -> RankDecoder:
    """The layers of one stage of a pipeline."""
    states = model.states()
    for layer in range(stage.first, stage.last):
        for spec in states[layer]:
            if isinstance(spec, Shared) and not stage.first <= spec.layer < stage.last:
                raise ConfigError(
                    f"Layer {layer} shares the keys and values of layer {spec.layer}, which another stage of the "
                    "pipeline computes; choose another pp."
                )
    embed, share = model.embed, model.share if isinstance(model, RankDecoder) else None
    if stage.before is not None:
        receive, before, dtype = build.bind(receive_rows), stage.before, model.stream or build.dtype

        def embed(batch: Batch) -> Tensor:
            tokens = batch.tokens if share is None else share.entering(batch.tokens)
            rows: Tensor = receive(tokens, before, model.stream_size or model.hidden, dtype)
            return rows

    return RankDecoder.of(
        model,
        embed=embed,
        blocks=list(model.blocks)[stage.first : stage.last],
        norm=model.norm if stage.after is None else Passed(build, stage),
        first=stage.first,
        share=None if share is None else share.at_stage(stage.before is None, stage.after is None),
        all_states=states,
    )
