"""The placement of one copy of the model over several devices, and what it does to the time of a step.

Tensor ranks split weights and arithmetic; context ranks split tokens, not weights; stages split layers. Collectives add
their alpha-beta time. A pipeline of p stages runs m micro-batches in m + p - 1 turns, so that the share (p-1)/(m+p-1)
of its time is a bubble.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bankfull.limits.layout.dims import ModelDims
from bankfull.limits.layout.memory import expert_share, kv_share, most_weights, state_share
from bankfull.limits.layout.wire import exchanges, span
from bankfull.limits.machine.links import DeviceLink, Interconnect
from bankfull.ranks.mesh import MeshSpec

REACHED = 0.8
"""Assumed fraction of a link's bandwidth that a collective reaches."""
STEPS, LOGITS, TOKENS, LOGIT_ROWS = range(4)
FIXED_FEATURES = 6
"""Features before those of the windows; see closed_form."""


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """Time of the collectives of a step. It is linear in tokens and rows of logits: fixed, per token, per row."""

    with_logits: tuple[float, float, float]
    without: tuple[float, float, float]
    least: tuple[tuple[float, float], ...]
    """Seconds of the bytes per token and per row, for each stage, link and side."""


def _exchange_times(mesh: MeshSpec, dims: ModelDims, links: Interconnect) -> ExchangeTimes:
    def seconds(tokens: float, rows: float) -> float:
        return sum(one.seconds(mesh, links, REACHED) for one in exchanges(dims, mesh, tokens, rows))

    def bytes_seconds(stage: int, tokens: float, rows: float) -> dict[tuple[DeviceLink, bool], float]:
        by_link: dict[tuple[DeviceLink, bool], float] = {}
        for one in exchanges(dims, mesh, tokens, rows, stage):
            link = links.link(span(mesh, one.axis))
            by = link, one.by_feeds
            by_link[by] = by_link.get(by, 0.0) + one.sent / link.bytes_per_s
        return by_link

    both, bare = seconds(1, 1), seconds(1, 0)
    by_token, by_row = seconds(2, 1) - both, seconds(1, 2) - both
    least = []
    for stage in range(mesh.pp):
        tokens, rows = bytes_seconds(stage, 1, 0), bytes_seconds(stage, 0, 1)
        least += [(tokens.get(by, 0.0), rows.get(by, 0.0)) for by in {**tokens, **rows}]
    return ExchangeTimes(
        (both - by_token - by_row, by_token, by_row), (bare - by_token, by_token, 0.0), tuple(dict.fromkeys(least))
    )


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """A mesh of a model on connected devices."""

    mesh: MeshSpec
    dims: ModelDims
    links: Interconnect
    times: ExchangeTimes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", _exchange_times(self.mesh, self.dims, self.links))

    @property
    def ways(self) -> int:
        """Devices of one replica."""
        return self.mesh.ranks

    @property
    def activation_ranks(self) -> int:
        """Ranks that share the activations of a step: of the smaller side."""
        together = self.mesh.tp * self.mesh.cp
        return min(together, self.mesh.ffn) if self.mesh.ffn else together

    @property
    def weights(self) -> float:
        """Bytes of weights on the rank that has most."""
        return most_weights(self.dims, self.mesh)

    @property
    def state_share(self) -> float:
        """Fraction of a sequence's state on the rank that has most of it."""
        return state_share(self.dims, self.mesh)

    def seconds(self, tokens: float, rows: float) -> float:
        """Likely time of the collectives of a step, one after the other through all stages."""
        fixed, by_token, by_row = self.times.with_logits if rows > 0 else self.times.without
        return fixed + by_token * tokens + by_row * rows

    def least_seconds(self, tokens: float, rows: float) -> float:
        """Time of the busiest rank's bytes alone. Latency is no limit, and collectives may overlap."""
        return max((by_token * tokens + by_row * rows for by_token, by_row in self.times.least), default=0.0)

    def micro_batches(self, sequences: int) -> list[int]:
        """Numbers of micro-batches to choose from: rows are split over as many as a pipeline can use."""
        stages = self.mesh.pp
        return [1] if stages == 1 else sorted({1, *(max(1, min(sequences, n * stages)) for n in (1, 2, 4))})

    def turns(self, micro: int) -> float:
        """Time of a pipeline, relative to that of a micro-batch through all stages in turn."""
        return (micro + self.mesh.pp - 1) / self.mesh.pp

    def bubble(self, micro: int) -> float:
        """Share of its time in which a stage waits."""
        return (self.mesh.pp - 1) / (micro + self.mesh.pp - 1)

    def micro_batch(self, features: np.ndarray, micro: int, tokens: float, shares: tuple[float, ...]) -> np.ndarray:
        """Features of one of the micro-batches of a step: each reads the weights again, and the experts that its tokens
        use. Experts that are copied see only the tokens of their ranks."""
        scaled = features / micro
        scaled[[STEPS, LOGITS]] = features[[STEPS, LOGITS]]
        copies = self.mesh.feed_ranks / (self.mesh.ep * self.mesh.expert_tp)
        for index, share in enumerate(reversed(shares), 1):
            used = 1 - (1 - share) ** (tokens / (micro * copies))
            scaled[-index] = features[-index] * used / (1 - (1 - share) ** tokens)
        return scaled

    def divisors(self, width: int, windows: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of ranks over which the bytes of weights and state, and all else, are divided, by feature.

        `kind`: weights, head, attention, recurrent or rest, by what the operations of the kind work on."""
        mesh = self.mesh
        every = np.full(width, float(mesh.tp * mesh.cp))
        every[[STEPS, LOGITS]] = mesh.tp
        lasting = every.copy()
        if kind == "weights":
            if mesh.ffn:  # the sides of one batch take turns
                for feature in (STEPS, TOKENS):
                    share = self.dims.feed_share(active=feature == TOKENS)
                    every[feature] = lasting[feature] = 1 / ((1 - share) / mesh.tp + share / mesh.ffn)
            every[FIXED_FEATURES + 2 * windows :] = lasting[FIXED_FEATURES + 2 * windows :] = self._experts_divided()
        elif kind == "attention":
            lasting[FIXED_FEATURES : FIXED_FEATURES + 2 * windows] = 1 / self._kv_read()
        elif kind == "recurrent":  # each context rank runs the whole scan
            every[:] = lasting[:] = mesh.tp
        elif kind == "rest":  # norms and sums run on whole rows, unless ranks have their own
            every[:] = lasting[:] = mesh.cp * (mesh.tp if mesh.sp == "megatron" else 1)
            every[[STEPS, LOGITS]] = lasting[[STEPS, LOGITS]] = 1
        return lasting, every

    def _experts_divided(self) -> float:
        """Ranks over which the experts of a layer are divided, on the rank that has most; hot ones are copied."""
        shares = [
            expert_share(layer.experts.experts, self.mesh) for layer in self.dims.layers if layer.experts is not None
        ]
        return 1 / max(shares, default=1.0)

    def _kv_read(self) -> float:
        """Fraction of the K/V of a layer that a rank reads, averaged over layers."""
        attending = [layer for layer in self.dims.layers if layer.attention is not None]
        return sum(kv_share(layer, self.mesh) for layer in attending) / len(attending) if attending else 1.0
