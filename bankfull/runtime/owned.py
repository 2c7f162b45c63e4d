"""Steps of a model that a strategy owns, over the rows and pages of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from bankfull.decode.strategy import OwnModel
from bankfull.errors import ConfigError
from bankfull.layers.batch import Batch
from bankfull.runtime.batch import GatheredPlaces, build_batch, placed_from_newest, tokens_before
from bankfull.runtime.device import Device
from bankfull.runtime.forward import Eager, Forward
from bankfull.runtime.rows import Rows
from bankfull.state.spec import Layout
from bankfull.state.storage import Storage
from bankfull.types import Work


class OwnedSteps:
    """What `Strategy.attach` gets. The own model's layers come after the target model's in the layout."""

    def __init__(
        self, own: OwnModel, layout: Layout, storage: Storage, first: int, rows: Rows, device: Device, captured: bool
    ) -> None:
        """`first`: the number of the own model's first layer. `captured`: whether its steps are captured where the
        device captures steps of any batch (a CPU's tape); on a GPU its operations are launched one by one."""
        eager = Eager(own.model, layout, storage.layers, first)
        if eager.layout.recurrent is not None:
            raise ConfigError(
                "A strategy's own model cannot have recurrent state, because rejected drafts cannot be taken back from "
                "it; choose a model of attention layers only."
            )
        self._layout, self._rows = layout, rows
        self._run: Forward = device.capture(eager, own.kit) if captured and not own.reads_features else eager
        rows.follow_pages()

    def run(self, batch: Batch) -> Tensor:
        return self._run(batch)

    @property
    def lines(self) -> int:
        return self._rows.known.shape[0]

    def computed(self, host_rows: Sequence[int]) -> np.ndarray:
        return self._rows.computed[list(host_rows)]

    def room(self, host_rows: Sequence[int], most: int) -> np.ndarray:
        rows, index = self._rows, list(host_rows)
        assert rows.covered is not None
        end = np.minimum(rows.covered[:, index].min(0), rows.tokens.shape[1] - 1)
        return np.clip(end - rows.computed[index], 0, most)

    def ahead(self, host_rows: Sequence[int], count: int) -> GatheredPlaces:
        return GatheredPlaces(self._rows, self._layout, host_rows, count)

    def batch(self, host_rows: Sequence[int], first: int, counts: Sequence[int] | np.ndarray) -> Batch:
        return placed_from_newest(self._rows, self._layout, host_rows, first, counts)


class RunStep:
    """A step whose forward pass has been enqueued (`ComputedStep`)."""

    def __init__(
        self,
        work: Sequence[Work],
        rows: Rows,
        layout: Layout,
        batch: Batch,
        hidden: Tensor,
        tapped: Mapping[int, Tensor],
    ) -> None:
        self.work, self.hidden, self.tapped = work, hidden, tapped
        self._rows, self._layout = rows, layout
        self._batch: Batch | None = batch if batch.kv_slots or not layout.paged else None

    @property
    def batch(self) -> Batch:
        if self._batch is None:  # a replayed step returns only the part that the choice of tokens reads
            self._batch = build_batch(self.work, self._rows, self._layout)
        return self._batch

    @property
    def before(self) -> Tensor:
        return tokens_before(self.work, self._rows)

    def ship(self, numbers: np.ndarray, /) -> Tensor:
        return self._rows.index(numbers)
