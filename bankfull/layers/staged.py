"""A model of which this rank computes one stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.stage import Stage
from bankfull.ops import add, receive_rows, send_rows
from bankfull.state.spec import Shared, StateSpec


@dataclass(slots=True)
class StageDecoder(Decoder):
    """`blocks` are this stage's. `states` are the whole model's, because pages are planned for all layers."""

    first: int = 0
    all_states: list[tuple[StateSpec, ...]] = field(default_factory=list)

    def states(self) -> list[tuple[StateSpec, ...]]:
        return self.all_states


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


def staged(model: Decoder, build: Build, stage: Stage) -> StageDecoder:
    states = model.states()
    for layer in range(stage.first, stage.last):
        for spec in states[layer]:
            if isinstance(spec, Shared) and not stage.first <= spec.layer < stage.last:
                raise ConfigError(
                    f"Layer {layer} shares the keys and values of layer {spec.layer}, which another stage of the "
                    "pipeline computes; choose another pp."
                )
    embed, norm = model.embed, model.norm
    if stage.before is not None:
        receive, before, dtype = build.bind(receive_rows), stage.before, model.stream or build.dtype
        share = model.share

        def embed(batch: Batch) -> Tensor:
            tokens = batch.tokens if share is None else share.entering(batch.tokens)
            rows: Tensor = receive(tokens, before, model.stream_size or model.hidden, dtype)
            return rows

    return StageDecoder(
        model.vocab,
        model.hidden,
        model.max_positions,
        embed=embed,
        blocks=list(model.blocks)[stage.first : stage.last],
        norm=norm if stage.after is None else Passed(build, stage),
        head=model.head,
        ropes=model.ropes,
        diffusion=model.diffusion,
        stream=model.stream,
        stream_size=model.stream_size,
        share=None if model.share is None else model.share.at_stage(stage.before is None, stage.after is None),
        first=stage.first,
        all_states=states,
    )
