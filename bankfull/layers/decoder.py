"""The structure of all language models here: an embedding, a stack of residual blocks, a norm, a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Projection, StoredRows
from bankfull.layers.mixer import Angles, Mixer
from bankfull.layers.norm import Norm, Reader, RMSNorm
from bankfull.layers.rope import Rope
from bankfull.ops import Unnormed, soft_cap
from bankfull.ops.products.body import highest
from bankfull.progress import PROGRESS
from bankfull.state.spec import StateSpec
from bankfull.state.storage import LayerStates

Module = Callable[[Tensor], Tensor]
Feed = Callable[[Any], Tensor]
"""A feed-forward layer over normed rows; one that is a `Reader` may get them `Unnormed`."""
Stream = tuple[Tensor, Tensor | None]
"""The residual stream, and a branch that is not added yet: the next norm adds it in the same operation."""


@dataclass(slots=True)
class Block:
    """x + mix(x), then x + feed(x); norms before each branch, and after it where the family has them."""

    mixer: Mixer
    before_mixer: Norm
    feed: Feed | None = None
    before_feed: Norm | None = None
    after_mixer: Module | None = None
    after_feed: Module | None = None
    add_branches: Callable[[Tensor, Tensor], Tensor] | None = None
    """Parallel residual (GPT-NeoX): both branches read the block's input, and this operation adds them."""
    normed_stream: bool = False
    """The residual of each branch is its normed input (MiniMax)."""
    norm_last: bool = False
    """Post-norm (early OPT): the `before_*` norms are applied to the sum, and their result is the stream."""

    def __post_init__(self) -> None:
        if self.norm_last or self.normed_stream:
            return
        for norm, reader in ((self.before_mixer, self.mixer), (self.before_feed, self.feed)):
            if isinstance(norm, RMSNorm) and isinstance(reader, Reader):
                norm.reader = reader

    def run(
        self,
        stream: Stream,
        states: LayerStates,
        meta: Any,
        angles: Angles | None,
        entering: list[Tensor] | None = None,
    ) -> Stream:
        """`entering`: gets the hidden states that enter the block, which are valid when it has run."""
        if self.norm_last:
            if entering is not None:
                entering.append(stream[0])
            return self._run_post_norm(stream, states, meta, angles)
        x, inner = self.before_mixer.join(*stream)
        if entering is not None:
            entering.append(x)
        if self.normed_stream:
            assert isinstance(inner, Tensor)
            x = inner
        branch = self.mixer.run(inner, states, meta, angles)
        if self.after_mixer is not None:
            branch = self.after_mixer(branch)
        if self.feed is None or self.before_feed is None:
            return x, branch
        if self.add_branches is not None:
            return x, self.add_branches(branch, self.feed(self.before_feed(x)))
        x, inner = self.before_feed.join(x, branch)
        if self.normed_stream:
            assert isinstance(inner, Tensor)
            x = inner
        branch = self.feed(inner)
        return x, branch if self.after_feed is None else self.after_feed(branch)

    def _run_post_norm(self, stream: Stream, states: LayerStates, meta: Any, angles: Angles | None) -> Stream:
        x, pending = stream
        assert pending is None and self.feed is not None and self.before_feed is not None
        _, x = joined(self.before_mixer, x, self.mixer.run(x, states, meta, angles))
        _, x = joined(self.before_feed, x, self.feed(x))
        return x, None


def joined(norm: Norm, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
    """`norm.join` for a norm without a `reader`, which always returns normed rows."""
    x, inner = norm.join(x, branch)
    assert isinstance(inner, Tensor)
    return x, inner


class Head:
    """Computes logits from hidden states."""

    def __init__(
        self,
        build: Build,
        project: Projection,
        stored: StoredRows,
        cap: float | None = None,
    ) -> None:
        """`stored` reads rows of the matrix of `project` again, by token id, also those that other ranks hold."""
        self.build, self.project, self.stored, self.cap = build, project, stored, cap
        self._cap = build.bind(soft_cap)

    @property
    def elsewhere(self) -> bool:
        """Whether a later stage has the weights; this one never runs the head."""
        stage = self.build.stage
        return stage is not None and stage.after is not None

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._scores(hidden)

    def _scores(self, hidden: Tensor) -> Tensor:
        """One for each row of the matrix."""
        scores = self.project(hidden)
        return scores if self.cap is None else self._cap(scores, self.cap)

    def best(self, hidden: Tensor | Unnormed) -> Tensor:
        """The token with the highest logit, the lowest id among equal ones; -1 where that logit is not finite."""
        if self.cap is None:
            return self.project.best(hidden)
        # Under the cap, rounding may make different scores equal: the capped logits decide.
        assert isinstance(hidden, Tensor)
        return highest(self._scores(hidden))

    def norms(self, rows: int) -> bool:
        """Whether `best` takes this many rows `Unnormed`."""
        return self.cap is None and self.project.norms_for_best(rows)


@dataclass(frozen=True, slots=True)
class MaskedDiffusion:
    """A model that predicts the tokens at masked positions instead of the next token."""

    mask: int
    """Id of the mask token."""
    block: int
    """`Heads.block` of its attention layers: tokens of a block that see each other, or `WHOLE_SEQUENCE`."""
    shifted: bool = False
    """Whether the hidden state of a position predicts the token of the next one, as in a model that was initialized
    from an autoregressive one; else it predicts the token of its own position."""


@dataclass(slots=True)
class Decoder:
    """A model: `forward` returns the hidden states after the last norm, `head` turns them into logits."""

    vocab: int
    hidden: int
    max_positions: int
    embed: Callable[[Batch], Tensor]
    blocks: Sequence[Block]
    norm: Norm
    head: Head
    ropes: Mapping[str, Rope]
    diffusion: MaskedDiffusion | None = None
    """Set for a diffusion language model."""
    stream: torch.dtype | None = None
    """Dtype of the residual stream, where it is wider than that of its branches."""
    stream_size: int = 0
    """Columns of the residual stream, where they are others than `hidden`; 0 = the same."""
    before_best: Norm = field(init=False)
    """The last norm as `best` uses it, where only the head reads it."""

    def __post_init__(self) -> None:
        self.before_best = self.norm.read_by(self.head) if isinstance(self.norm, RMSNorm) else self.norm

    def states(self) -> list[tuple[StateSpec, ...]]:
        """The states of each layer."""
        return [block.mixer.states for block in self.blocks]

    @property
    def mixers(self) -> list[Mixer]:
        return [block.mixer for block in self.blocks]

    def forward(
        self,
        batch: Batch,
        states: Sequence[LayerStates],
        metas: Sequence[Any],
        taps: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of every token. `taps` maps layer numbers to the hidden states that enter the layer, filled
        during the pass; they are results of the operations that run without it, too."""
        return self.leave(joined(self.norm, *self._stream(batch, states, metas, taps))[1], batch)

    def best(self, batch: Batch, states: Sequence[LayerStates], metas: Sequence[Any]) -> Tensor:
        """The most likely next token after each token: `head.best` of the hidden states, which are not returned."""
        return self.head.best(self.before_best.join(*self._stream(batch, states, metas, None))[1])

    def enter(self, batch: Batch) -> tuple[Batch, Tensor]:
        """The step's tokens that are computed here, and the rows of the stream for them."""
        return batch, self.embed(batch)

    def leave(self, x: Tensor, batch: Batch) -> Tensor:
        """The rows of all tokens of the step, from those of the stream."""
        return x

    def _stream(
        self, batch: Batch, states: Sequence[LayerStates], metas: Sequence[Any], taps: dict[int, Tensor] | None
    ) -> Stream:
        own, x = self.enter(batch)
        angles = own.angles or {name: rope(own.positions) for name, rope in self.ropes.items()}
        stream: Stream = (x, None)
        for i, block in enumerate(self.blocks):
            rope = block.mixer.rope
            entering: list[Tensor] | None = None if taps is None or i not in taps else []
            stream = block.run(stream, states[i], metas[i], None if rope is None else angles[rope], entering)
            PROGRESS.tick()
            if taps is not None and entering:
                taps[i] = self.leave(entering[0], batch)
        return stream
