"""Decoding is propose -> verify -> accept. Plain sampling is the strategy without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.adaptive import halved
from bankfull.layers.batch import Batch
from bankfull.layers.decoder import Decoder
from bankfull.ops.registry import Kit
from bankfull.sample.logits import Sampled
from bankfull.sample.table import PLAIN, SamplingTable
from bankfull.state.spec import StateSpec
from bankfull.types import CanvasShape, Work

Ship = Callable[[Sequence[int] | np.ndarray], Tensor]


@dataclass(slots=True)
class Draft:
    """Draft tokens of some rows (rows, width): a chain each, or a tree. A row with fewer drafts is padded with any
    tokens, which verification rejects like all wrong drafts."""

    tokens: Tensor
    parents: Tensor | np.ndarray | None = None
    """The index of each draft's parent among its row's drafts, -1 for the row's last known token; smaller than its own.
    A tensor (rows, width); an array (width) if all rows have the same tree; None: chains."""
    scores: Tensor | None = None
    """(rows, places, vocabulary) for sampled drafts, which the rejection rule needs: softmax gives the distribution
    from which the children of the last known token, then of draft 0, draft 1, ... were drawn. Last drafts without
    children are left out."""


class LogitsHead(Protocol):
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits."""
        ...

    def best(self, hidden: Tensor) -> Tensor:
        """The token with the highest logit, the lowest id among equal ones; -1 where that logit is not finite."""
        ...


@dataclass(slots=True)
class Scores:
    """The model's scores for some positions. Logits are computed only when they are needed."""

    hidden: Tensor
    head: LogitsHead

    def logits(self) -> Tensor:
        return self.head(self.hidden)

    def best(self) -> Tensor:
        return self.head.best(self.hidden)


class Sampling:
    """The input of sampling. A row with w drafts has w + 1 lines, one per position to sample.

    Tensors are made on first use: plain greedy decoding uses none of them.
    """

    def __init__(
        self,
        host_rows: Sequence[int],
        widths: Sequence[int],
        positions: Tensor,
        index: np.ndarray,
        tokens: Tensor,
        table: SamplingTable,
        ship: Ship,
        mask: Tensor | None = None,
        tree: DraftTree | None = None,
    ) -> None:
        """`positions`: of all tokens of the step. `index`: the token of each line. `tree`: set if the drafts of a row
        may be a tree."""
        self.host_rows = host_rows
        """The permanent row of each line."""
        self.widths = widths
        """Lines per row of the step, in order."""
        self.tokens = tokens
        """(all rows, longest) token ids of every permanent row, drafts after the known ones."""
        self.table, self.mask, self.tree = table, mask, tree
        self.ship = ship
        """Copies integers to the device without waiting for it."""
        self._positions, self._index = positions, index

    @cached_property
    def rows(self) -> Tensor:
        """(lines) `host_rows` on the device."""
        return self.ship(self.host_rows)

    @cached_property
    def length(self) -> Tensor:
        """(lines) tokens before the position to sample, drafts on the path to it included."""
        return self._positions[self.ship(self._index)] + 1

    @cached_property
    def history(self) -> tuple[Tensor, Tensor]:
        """Token ids before the position of each line, and the line of the tensor that holds them. In a tree, each line
        has its own, with the drafts on its path."""
        needed = any(self.table.facts[row].reads_tokens for row in self.host_rows)
        if self.tree is None or not needed:
            return self.tokens, self.rows
        tokens = self.tokens[self.rows]
        lines = torch.arange(len(self.host_rows), device=tokens.device)
        first = lines - self.tree.within(self.widths, self.ship)
        node, ids = lines, self.tree.ids
        for _ in range(max(self.widths) - 1):  # from the line's own draft up to the row's last known token
            tokens[lines, self.length[node] - 1] = ids[node]
            node = first + self.tree.parents[node]
        return tokens, lines

    @property
    def plain_greedy(self) -> bool:
        """Whether every line wants the most likely token and nothing else."""
        facts = self.table.facts
        return self.mask is None and all(facts[row] is PLAIN for row in self.host_rows)


@dataclass(slots=True)
class Verdict:
    """Per row of the step: tokens[i, :counts[i]] are accepted drafts and one sampled token; without counts, one sampled
    token per row. `sampled` is in line order."""

    tokens: Tensor
    counts: Tensor | None
    sampled: Sampled
    path: Tensor | None = None
    """The row's line after which each token was sampled, in the form of `tokens`. The first one is 0; the next ones are
    the lines of accepted drafts, in ascending order. None if drafts are chains: then path[i, j] = j."""
    denoised: bool = False
    """Diffusion: `counts` are tokens of finished blocks, 0 for the other rows. Their state is computed again."""


class DraftTree:
    """The lines of a step's drafts as trees. A row's line 0 is its last known token, line j + 1 its draft j."""

    def __init__(self, parents: Tensor, ids: Tensor) -> None:
        self.parents = parents
        """(lines) each line's parent as the number of a line within its row; a row's first line is its own parent."""
        self.ids = ids
        """(lines) token ids."""

    @staticmethod
    def within(widths: Sequence[int], ship: Ship) -> Tensor:
        """(lines) the number of each line within its row."""
        return ship([j for width in widths for j in range(width)])


class View:
    """Rows that will decode next, for a proposer, after their newest tokens were committed."""

    def __init__(
        self,
        host_rows: Sequence[int],
        tokens: Tensor,
        known: Tensor,
        sampling: SamplingTable,
        ship: Ship,
        newest: Callable[[], Tensor],
        hidden: Tensor,
        width: int,
        lines: Sequence[int],
    ) -> None:
        """`newest`: makes the indices of `at_newest`. `hidden`: the last hidden state of every token of the step."""
        self.host_rows, self.sampling, self.ship = host_rows, sampling, ship
        self.width = width
        """Drafts of each row that the next step verifies, at most. A strategy may propose more."""
        self.lines = lines
        """Lines of each row in the step: its last known token and the drafts that it has verified."""
        self.tokens = tokens
        """(all rows, longest) token ids of every permanent row. A proposer may write draft tokens after the known ones:
        the row's next step verifies what is there."""
        self.known = known
        """(all rows) number of known tokens of a row."""
        self._make_newest, self._hidden = newest, hidden

    @cached_property
    def rows(self) -> Tensor:
        """(rows) `host_rows` on the device."""
        return self.ship(self.host_rows)

    @cached_property
    def _newest(self) -> Tensor:
        return self._make_newest()

    def at_newest(self, values: Tensor) -> Tensor:
        """(rows, ...) from (tokens, ...) over the tokens of the step: the line from which each row's newest token was
        sampled."""
        return values[self._newest]

    @cached_property
    def hidden(self) -> Tensor:
        """(rows, d) the target model's last hidden state, the input of its head, from which each row's newest token was
        sampled. Gathered on first use."""
        return self.at_newest(self._hidden)


class ComputedStep(Protocol):
    """A step after the target model has run and before its tokens are chosen."""

    @property
    def work(self) -> Sequence[Work]: ...

    @property
    def batch(self) -> Batch:
        """The tokens of the step with their positions, page tables and KV slots. A step that was replayed from a
        capture builds them on first use."""
        ...

    @property
    def hidden(self) -> Tensor:
        """(tokens, d) the target model's last hidden states, in the order of the batch, valid within this step."""
        ...

    @property
    def tapped(self) -> Mapping[int, Tensor]:
        """(tokens, d) for each layer in `Strategy.taps`: the hidden states that entered it, like `hidden`."""
        ...

    @property
    def before(self) -> Tensor:
        """(tokens) the index in the batch of the token before each one: its parent, where drafts are a tree. -1 for the
        first token of each sequence, whose predecessor ran in an earlier step."""
        ...

    def ship(self, numbers: np.ndarray, /) -> Tensor:
        """Copies integers to the device without waiting for it."""
        ...


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model that a strategy runs beside the target model, and the kit that it was built with."""

    model: Decoder
    kit: Kit
    reads_features: bool = False
    """Whether it reads `Batch.features`. A CPU's tape has no input for them, so such a model runs uncaptured."""


class PlacesAhead(Protocol):
    """KV slots of some rows from their newest known token on, gathered at once for several passes."""

    @property
    def tokens(self) -> Tensor:
        """(rows, places) the tokens there; the first place is that of the newest known token."""
        ...

    def batch(self, first: int, count: int, tokens: Tensor) -> Batch:
        """`tokens` (rows, count) at the places from `first` on."""
        ...


class OwnSteps(Protocol):
    """Runs a strategy's own model over the engine's rows. Its keys and values are in the same pages as those of the
    target model, so the prefix cache, forks, preemption and accepted trees need nothing more."""

    def run(self, batch: Batch) -> Tensor:
        """Hidden states of every token of the batch, valid until the next call. The tokens' keys and values are
        written."""
        ...

    @property
    def lines(self) -> int:
        """Lines of a tensor with one line per permanent row, the spare one included."""
        ...

    def computed(self, host_rows: Sequence[int]) -> np.ndarray:
        """(rows) computed tokens of each row, known to the host: exact when a sequence has just entered."""
        ...

    def room(self, host_rows: Sequence[int], most: int) -> np.ndarray:
        """(rows) the number of KV slots that the row has from its newest known token on, at most `most`. Known to the
        host, without waiting. Slots that a row does not have must not be written."""
        ...

    def ahead(self, host_rows: Sequence[int], count: int) -> PlacesAhead:
        """`count` places of each row; all of these rows have room for them. Only in `propose`."""
        ...

    def batch(self, host_rows: Sequence[int], first: int, counts: Sequence[int] | np.ndarray) -> Batch:
        """counts[i] tokens of host_rows[i], from place `first` on: 0 is the place of its newest known token, -1 that of
        the token before, 1 that of its first draft. Only in `propose`, when newest tokens have not run yet."""
        ...


class Strategy(Protocol):
    """Subclass it: members that a strategy does not need have defaults. A step calls `follow`, `verify`, `observe` and
    `propose` in this order, all in the device's order of work; none of them waits for the device."""

    idle: bool = False
    """Whether it proposes nothing and learns nothing, so that a captured step may choose tokens without it."""
    exact: bool = False
    """Whether `verify` is the rule of `decode.verify`, which a captured step may then compute without it."""
    trees: bool = False
    """Whether its drafts may be trees; models with recurrent state cannot verify them."""
    follows: bool = False
    """Whether `follow` is called."""
    late: bool = True
    """Whether it drafts as well where it runs tokens later than the target model."""
    share: float = 0.0
    """The cost of a token in a model of its own that runs every token of a sequence, roughly and relative to the target
    model; 0 if it has none. Set after `prepare`."""
    taps: tuple[int, ...] = ()
    """Layers of the target model whose entering hidden states `follow` reads."""
    mask: int | None = None
    """Diffusion: the mask token, which fills the places after the known tokens of a row."""
    canvas: CanvasShape | None = None
    """Diffusion: the blocks that are denoised. Set after `prepare`."""
    ahead: int = 0
    """KV slots per decoding row that `propose` writes, from the row's newest token on. The scheduler reserves them
    where memory allows (`OwnSteps.room`); a row without them gets no good drafts, and correct tokens."""

    @property
    def own(self) -> OwnModel | None:
        """The model that the strategy runs beside the target model. Its layers' states join the target model's layout;
        recurrent state is refused."""
        return None

    def states(self) -> list[tuple[StateSpec, ...]]:
        """The states of its own model's layers."""
        return [] if self.own is None else self.own.model.states()

    def prepare(self, target: Decoder) -> None:
        """Called once with the target model, before memory for state is planned: check it, and load weights."""
        return None

    def attach(self, steps: OwnSteps) -> None:
        """Called once, before the first step, if the strategy has its own model."""
        return None

    def width(self, load: int) -> int:
        """Drafts per row to verify while `load` rows run; 0 = plain decoding. `width(0)` is the most."""
        ...

    def widths(self) -> tuple[int, ...]:
        """Numbers of drafts per row that steps may verify, where they are chosen by their gain."""
        return halved(self.width(0))

    def begin(self, rows: Sequence[int]) -> None:
        """Called when new sequences have entered these rows."""
        return None

    def follow(self, step: ComputedStep) -> None:
        """Called in every step if `follows`, so that the own model can compute its keys and values for the same tokens:
        prompt chunks, known tokens and drafts, at the same positions and in the same pages."""
        return None

    def skip(self, rows: Sequence[int]) -> None:
        """Called instead of `propose` for these rows, if the next step verifies none of its drafts there."""
        return None

    def miss(self, work: Sequence[Work]) -> None:
        """Called instead of `follow`, `skip` and `propose` in a step whose rows it does not draft for: it has not run
        their tokens. `observe` is called all the same, unless the step is replayed from a capture as a whole."""
        return None

    def behind(self, row: int) -> int:
        """Tokens that it would have to run before it can draft for a row whose sequence has begun; negative if it
        cannot any more. Asked by the host between two launches: the answer may be a step old."""
        return 0

    def replace(self, rows: Sequence[int]) -> None:
        """Called before a step in which these rows verify other drafts than the strategy's own."""
        return None

    def propose(self, view: View) -> Draft | None: ...

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict: ...

    def observe(self, view: View, verdict: Verdict) -> None:
        """Called with each verdict, to learn from accepted drafts."""
        return None


def stack(flat: Tensor, widths: Sequence[int], fill: float) -> Tensor:
    """Lines, `widths` of each row, as a padded rectangle (rows, widest)."""
    widest = max(widths)
    if widest == 1:
        return flat[:, None]
    out = torch.full((len(widths), widest), fill, dtype=flat.dtype, device=flat.device)
    first = 0
    for i, width in enumerate(widths):
        out[i, :width] = flat[first : first + width]
        first += width
    return out
