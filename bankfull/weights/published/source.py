"""The tensors of a published checkpoint in our schemes, by the names of the unquantized model."""

from __future__ import annotations

import logging
from collections.abc import Collection

from bankfull.weights.published.matrix import EXPANDED, MatrixPlan, Published, StoredTensors
from bankfull.weights.qtensor import QTensor, Scheme

log = logging.getLogger("bankfull")

KV_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point", "prob_scale")
"""Scales of a quantized KV cache: only an fp8 cache uses some of them."""

ACTIVATION_SCALES = ("_scale", "_scale_ub", "_zero_point")


class PublishedSource:
    def __init__(self, files: StoredTensors, made: Published) -> None:
        self.about = made.about
        self._files, self._matrices = files, made.matrices
        self._plans: dict[str, MatrixPlan] = {}
        self._owned = {part: name for name, matrix in made.matrices.items() for part in matrix.owns}
        self._ignored = made.ignored | {name for name in files.names() if name.rpartition(".")[2] in KV_SCALES}
        self._loaded: set[str] = set()
        self._told: set[str] = set()
        if scales := [name for name in made.ignored if name.endswith(ACTIVATION_SCALES)]:
            log.warning(
                f"{len(scales)} scales of activations in the checkpoint are ignored: products round activations, if "
                "at all, by this engine's own rule (--activations)."
            )

    @property
    def quantized(self) -> Collection[str]:
        """Names of the matrices that are stored quantized."""
        return self._matrices.keys()

    def names(self) -> list[str]:
        return [*filter(self._is_plain, self._files.names()), *self._matrices]

    def has(self, name: str) -> bool:
        stored = self._files.has(name) and (self._is_plain(name) or name.rpartition(".")[2] in KV_SCALES)
        return name in self._matrices or stored

    def _is_plain(self, name: str) -> bool:
        return name not in self._owned and name not in self._ignored

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self._files.shape(name) if matrix is None else matrix.shape

    def scheme(self, name: str) -> Scheme:
        return self._plan(name).scheme if name in self._matrices else self._files.scheme(name)

    def outlier_count(self, name: str) -> int | None:
        """The number of columns that are kept beside a matrix; None for tensors without such."""
        count: int | None = getattr(self._matrices.get(name), "outlier_count", None)
        return count

    def get(self, name: str) -> QTensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._files.get(name)
        plan = self._plan(name)
        if plan.scheme == EXPANDED and plan.reason not in self._told:
            self._told.add(plan.reason)
            log.warning(f"some weights are expanded to bfloat16 at load, because {plan.reason}.")
        tensor = matrix.load(plan)
        self._loaded.add(name)
        return tensor

    def unread(self) -> list[str]:
        """Names in the file, as for other sources; a part of a matrix counts as read with it."""
        return [
            name
            for name in self._files.unread()
            if name not in self._ignored and self._owned.get(name, "") not in self._loaded
        ]

    def release(self) -> None:
        self._files.release()

    def _plan(self, name: str) -> MatrixPlan:
        if name not in self._plans:
            self._plans[name] = self._matrices[name].plan()
        return self._plans[name]
