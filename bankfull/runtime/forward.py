"""Ways to run a batch through the model: operation by operation, or captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.layers.batch import Batch
from bankfull.layers.mixer import Mixer
from bankfull.layers.rope import Rope
from bankfull.state.spec import Layout, StateSpec
from bankfull.state.storage import LayerStates

if TYPE_CHECKING:
    from bankfull.decode.strategy import Strategy, Verdict
    from bankfull.ops.registry import Kit
    from bankfull.runtime.rows import Rows
    from bankfull.sample.table import Chooser
    from bankfull.types import Work


class Model(Protocol):
    """A model as the runner sees it."""

    vocab: int
    head: Any
    ropes: Mapping[str, Rope]

    @property
    def mixers(self) -> list[Mixer]: ...
    def states(self) -> list[tuple[StateSpec, ...]]: ...
    def forward(
        self, batch: Batch, states: Sequence[LayerStates], metas: Sequence[Any], taps: dict[int, Tensor] | None = None
    ) -> Tensor: ...
    def best(self, batch: Batch, states: Sequence[LayerStates], metas: Sequence[Any]) -> Tensor: ...


def first_layer(model: Model) -> int:
    """The place of the model's first layer in the layout: a stage of a pipeline begins later."""
    return getattr(model, "first", 0)


def plan_mixers(model: Model, layout: Layout, batch: Batch) -> list[Any]:
    """One meta per layer, made once for all mixers of a class whose states are in the same groups."""
    plans: dict[tuple[type, tuple[int | None, ...]], Any] = {}
    metas = []
    for mixer, groups in zip(model.mixers, layout.groups, strict=True):
        key = (type(mixer), groups)
        if key not in plans:
            plans[key] = mixer.plan(batch, groups)
        metas.append(plans[key])
    return metas


class Forward(Protocol):
    tapped: dict[int, Tensor]
    """Hidden states that entered a layer, by layer, for every token of the last call, if the forward was made with
    taps. Valid as long as that call's result."""

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states of every token of the batch, valid until the next call."""
        ...


class ChoosingStep(Protocol):
    def __call__(self, rows: Sequence[int], slots: Sequence[int] = (), /) -> list[int] | Tensor:
        """Run one token of each of these rows and append the next one; NO_TOKEN where no token can be chosen. `slots`:
        for a model with recurrent state, the slot that each row's next state goes to. A tensor is in host memory,
        valid after the work has been waited for."""
        ...


class VerifyingStep(Protocol):
    def __call__(self, work: Sequence[Work], /) -> Verdict | None:
        """Verify the drafts of the step that was just replayed for this work, by the rule of `decode.verify`, and
        append its tokens to the rows. None if that is not captured. For work in which all rows sample, from jobs that
        `Rows.is_simple` accepts. The verdict's tensors are valid until the next call."""
        ...


@runtime_checkable
class Replaying(Protocol):
    """A forward that replays recorded steps."""

    tapped: dict[int, Tensor]
    """The same hidden states as `Forward.tapped`, after a replay, too."""

    @property
    def recorded(self) -> str:
        """The number of recorded steps and their memory, as text."""
        ...

    def capture(self, rows: Rows, widths: Sequence[int], chooser: Chooser | None, tokens: int) -> None:
        """Record steps of one known token and width - 1 drafts for each row, and steps of up to `tokens` tokens over
        sequences of any length."""
        ...

    def replay(self, work: Sequence[Work]) -> tuple[Batch, Tensor] | None:
        """The step's batch and hidden states if its kind is recorded. They are valid until the next call."""
        ...

    def __call__(self, batch: Batch) -> Tensor: ...


@runtime_checkable
class ChoosingForward(Protocol):
    """A captured forward that can also choose tokens."""

    def choosing(self, rows: Rows) -> ChoosingStep | None: ...


@runtime_checkable
class HoldsWeights(Protocol):
    """A captured forward that may hold weights in another form than the model does."""

    def weights_beside(self, eager: Eager, kit: Kit) -> list[tuple[Any, Any]]:
        """What it holds at fixed addresses, each with its twin if a model like this one were captured. Raises
        UnlikeTwins where that would be another step."""
        ...


class Eager:
    """Each operation is called from Python."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        states: Sequence[LayerStates],
        first: int = 0,
        taps: Sequence[int] = (),
    ) -> None:
        """`layout`, `states`: those of all models that share the pools; the model's own layers begin at `first`.
        `taps`: layers whose entering hidden states are kept in `tapped`."""
        count = len(model.mixers)
        self.model, self.layout, self.states = model, layout.part(first, count), states[first : first + count]
        self.taps = tuple(taps)
        self.tapped: dict[int, Tensor] = {}
        self.uncaptured: str | None = None
        """Why steps run without capture although the device captures steps: one sentence."""

    def __call__(self, batch: Batch) -> Tensor:
        taps: dict[int, Any] | None = dict.fromkeys(self.taps) if self.taps else None
        hidden = self.model.forward(batch, self.states, plan_mixers(self.model, self.layout, batch), taps)
        if taps:
            self.tapped = taps
        return hidden

    def best(self, batch: Batch) -> Tensor:
        """The most likely next token after each token of the batch."""
        return self.model.best(batch, self.states, plan_mixers(self.model, self.layout, batch))


def eager_of(model: Model, layout: Layout, states: Sequence[LayerStates], strategy: Strategy) -> Eager:
    """A model's forward over the state of a runner."""
    return Eager(model, layout, states, first_layer(model), checked_taps(strategy, len(model.mixers)))


def checked_taps(strategy: Strategy, layers: int) -> tuple[int, ...]:
    """The strategy's taps in ascending order; raises ConfigError where the model has no such layer."""
    taps = tuple(sorted(set(strategy.taps)))
    if taps and not 0 <= taps[0] <= taps[-1] < layers:
        raise ConfigError(
            f"The strategy {type(strategy).__name__} reads the layers {', '.join(map(str, taps))}, but the model's "
            f"layers go from 0 to {layers - 1}; use a strategy that was made for this model."
        )
    return taps
