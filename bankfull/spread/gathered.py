"""Linear layers whose outputs are spread over tensor ranks and gathered: heads over a vocabulary, and the layers of
drafters whose outputs every rank needs whole."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.axes import HIDDEN, as_axis
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, Projection, StoredRows
from bankfull.ops import Unnormed, gather_outputs
from bankfull.ops.products.body import highest
from bankfull.ranks.shard import RowShare
from bankfull.weights.qtensor import QTensor


class GatheredLinear:
    """A `Linear` of which each rank has its share of the rows. Every rank gets all outputs."""

    def __init__(self, build: Build, own: Linear, share: RowShare) -> None:
        """`own`: the layer with this rank's rows."""
        self.own, self.share = own, share
        self._gather = build.bind(gather_outputs)

    def __call__(self, x: Tensor) -> Tensor:
        outputs: Tensor = self._gather(self.own(x), self.share.group, self.share.count)
        return outputs

    def best(self, x: Tensor | Unnormed) -> Tensor:
        """The same as `Linear.best`. All ranks find the same index, because they have the same outputs."""
        assert isinstance(x, Tensor)
        return highest(self(x))

    def highest(self, x: Tensor, most: int) -> Tensor:
        """(rows, most) the outputs with the highest values, the highest first. Ranks exchange only those of each."""
        share, outputs = self.share, self.own(x)
        outputs[:, share.count - share.first :] = -torch.inf  # what pads the last rank is no output
        few = min(most, share.most)
        best = outputs.topk(few, -1)
        values, index = (
            self._gather(part, share.group, share.group.size * few)
            for part in (best.values, best.indices + share.first)
        )
        ids: Tensor = index.gather(1, values.topk(most, -1).indices)
        return ids.clamp_max(share.count - 1)

    def norms_for_best(self, rows: int) -> bool:
        return False


def gathered_linear(
    build: Build,
    inner: int,
    outer: int,
    bias: bool | Tensor = False,
    stored: StoredRows | None = None,
    int8_when_batched: bool = False,
) -> Projection:
    """A layer whose rows are spread over the tensor ranks of `build`; without these, a `Linear`. `bias`: whether the
    file has one, or all of it. `stored`: reads the weight from elsewhere than the file."""
    axes = as_axis(outer, HIDDEN), as_axis(inner, HIDDEN)
    share = build.row_share(outer)
    rows = None if share is None else share.rows
    weight: QTensor | None = None
    if stored is not None:
        weight = stored(rows)
    elif rows is not None:
        weight = build.rows_of("weight", axes, rows, for_linear=True)
    linear = Linear(
        build, inner, axes[0] if rows is None else len(rows), weight=weight, int8_when_batched=int8_when_batched
    )
    if bias is not False:
        whole = build.tensor("bias", axes[:1]) if bias is True else bias.to(build.device, build.dtype)
        linear.bias = whole if rows is None else whole[rows.to(whole.device)]
    return linear if share is None else GatheredLinear(build, linear, share)
