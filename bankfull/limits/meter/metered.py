"""A model on the meter: the family's own code over tensors that have a shape and a storage scheme but no data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from bankfull.axes import Axes, sizes
from bankfull.errors import ConfigError, ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.latent import LatentAttention
from bankfull.limits.meter.step import StepShape
from bankfull.models.registry import Config, build_model
from bankfull.ops.meter import Ledger, Meter
from bankfull.ops.products.activations import EXACT, ActivationRule
from bankfull.runtime.batch import blank_batch
from bankfull.runtime.forward import plan_mixers
from bankfull.state.mask import Mask
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.torch_parts import with_all
from bankfull.weights.blank_source import META, FileShapes, blank
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import ModelFiles

HEAD = "head"
"""Prefix of the operations that compute logits in the ledger: "head/linear", ..."""


class RequestedShapes:
    """Stands in for the file of a model that has none: provides every tensor that a layer requests, in the scheme that
    `choose` returns for its name and shape."""

    def __init__(
        self,
        choose: Callable[[str, tuple[int, ...]], Scheme],
        optional: Collection[str] = (),
        stacks_experts: bool = False,
        outliers: Mapping[str, int] | None = None,
    ) -> None:
        """`optional`: optional tensors that are present. `stacks_experts`: matrices of experts are one tensor unless
        the tensors of single experts are present. A model of 512 experts has 70,000 of those. `outliers`: numbers of
        columns that are kept beside matrices."""
        self._choose, self._optional, self.stacks_experts = choose, optional, stacks_experts
        self._outliers = outliers or {}
        self.read: dict[str, QTensor] = {}

    def names(self) -> list[str]:
        return list(dict.fromkeys((*self._optional, *self.read)))

    def has(self, name: str) -> bool:
        """Optional tensors count as absent unless listed; required ones are requested by their layer."""
        return name in self.read or name in self._optional

    def shape(self, name: str) -> tuple[int, ...]:
        return self.get(name).shape

    def scheme(self, name: str) -> Scheme:
        return self.get(name).scheme

    def get(self, name: str) -> QTensor:
        if name not in self.read:
            raise ModelError(f"Tensor {name} has no known shape without files; give a model directory or a .gguf file.")
        return self.read[name]

    def request(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.read:
            self.read[name] = blank(self._choose(name, shape), shape, self._outliers.get(name))

    def unread(self) -> list[str]:
        return []

    def release(self) -> None:
        """Nothing to release: nothing was read."""


@dataclass(frozen=True, slots=True)
class _RequestingBuild(Build):
    """Registers the shape of each tensor with the source before a layer reads it."""

    # Build is named explicitly: a dataclass with slots is a new class, so a bare super() fails.

    def stacked(self, name: str, count: int, axes: Axes, held: Sequence[int] | None = None) -> QTensor:
        assert isinstance(self.source, RequestedShapes)
        if self.source.stacks_experts and not self.has(name.format(0)):
            self.source.request(self._full(name.replace("{}.", "")), sizes((count, *axes)))
        return Build.stacked(self, name, count, axes, held)

    def _find(self, name: str, axes: Axes) -> QTensor:
        assert isinstance(self.source, RequestedShapes)
        self.source.request(self._full(name), sizes(axes))
        return Build._find(self, name, axes)


def torch_dtype(name: str | None, model: ModelFiles | Config) -> torch.dtype:
    """The dtype of the computation: `name` if given; else, as on a CPU, float32 for a GGUF file and the checkpoint's
    dtype for others."""
    saved = None
    if not isinstance(model, ModelFiles) or model.kind != "gguf":
        config = model.config if isinstance(model, ModelFiles) else model
        saved = config.get("dtype") or (config.get("text_config") or {}).get("dtype")
    wanted = saved or "float32" if name in (None, "auto") else name
    for known in DTYPES.values():
        if str(known).removeprefix("torch.") == str(wanted).removeprefix("torch."):
            return known
    raise ConfigError(f"dtype={wanted!r} is unknown; use float32, bfloat16, float16 or float64.")


class MeteredModel:
    """Returns the cost of any step. Reads no weight and allocates no state."""

    def __init__(
        self,
        model: ModelFiles | Mapping[str, Any],
        *,
        dtype: str | None = None,
        scheme: str | None = None,
        expand: bool = False,
        page_tokens: int = 16,
        kv_dtype: torch.dtype | None = None,
        activations: ActivationRule = EXACT,
        kv_evict: Mask | None = None,
        meter: Meter | None = None,
        shapes: RequestedShapes | None = None,
    ) -> None:
        """`scheme`: storage of the matrices of a bare configuration; a file has its own. `kv_dtype`: dtype of the KV
        cache; None = that of the computation. `activations` and `kv_evict`: as in a build. `meter`: a meter that
        records more than costs. `shapes`: stores each tensor of a bare configuration in a scheme of its own."""
        self.shapes: FileShapes | RequestedShapes
        if isinstance(model, ModelFiles):
            if scheme is not None:
                raise ConfigError(f"scheme={scheme!r} cannot be set: {model.path.name} defines its own; leave it out.")
            self.config: Config = model.config
            self.shapes = FileShapes(model.source)
        else:
            self.config = model
            self.shapes = _requested(scheme, torch_dtype(dtype, model)) if shapes is None else shapes
        self.dtype = torch_dtype(dtype, model)
        self.meter = meter or Meter()
        kind = Build if isinstance(self.shapes, FileShapes) else _RequestingBuild
        build = kind(self.shapes, self.meter, self.dtype, META, expand, kv_dtype=kv_dtype, activations=activations)
        self.build = replace(build, kv_evict=kv_evict)
        self.model = with_all(lambda: build_model(self.config, self.build))
        self.layout = layout_of(self.model.states(), page_tokens)

    @staticmethod
    def of_build(files: ModelFiles, build: Build) -> MeteredModel:
        """The model that was built from these files."""
        return MeteredModel(
            replace(files, source=build.source),
            dtype=str(build.dtype),
            expand=build.expand,
            kv_dtype=build.kv_dtype,
            activations=build.activations,
            kv_evict=build.kv_evict,
        )

    @property
    def parameters(self) -> int:
        """Elements of the tensors that the model uses; a tied head counts once."""
        return sum(prod(tensor.shape) for tensor in self.shapes.read.values())

    @property
    def takes_rounded_pages(self) -> bool:
        """Whether the KV cache may be rounded: there is one, and no layer needs it in floating point."""
        return bool(self.layout.paged) and not any(isinstance(mixer, LatentAttention) for mixer in self.model.mixers)

    @property
    def bytes_by_scheme(self) -> dict[str, int]:
        """Stored bytes by storage scheme, largest first."""
        by_scheme: dict[str, int] = {}
        for tensor in self.shapes.read.values():
            by_scheme[tensor.scheme.name] = by_scheme.get(tensor.scheme.name, 0) + tensor.nbytes
        return dict(sorted(by_scheme.items(), key=lambda item: -item[1]))

    def cost(self, step: StepShape) -> Ledger:
        """The minimum cost of a step by operation; the head's operations have the prefix "head/"."""
        return with_all(lambda: self._cost(step))

    def _cost(self, step: StepShape) -> Ledger:
        batch = self._batch(step)
        # One page and one slot suffice: costs depend on the batch, not on the size of the pools.
        states = Storage(self.layout, 1, 1, META).layers
        self.meter.take()
        with torch.inference_mode():
            hidden = self.model.forward(batch, states, plan_mixers(self.model, self.layout, batch))
            ledger = self.meter.take()
            if step.logits:
                self.model.head(hidden[: step.logits])
                ledger.merge(self.meter.take(), HEAD)
        return ledger

    def _batch(self, step: StepShape) -> Batch:
        widest = max(step.lengths)
        return blank_batch(
            np.concatenate(([0], np.cumsum(step.counts))),
            np.array(step.lengths),
            step.tokens,
            [(-(-widest // group.page_tokens), group.page_tokens) for group in self.layout.paged],
            lambda name, shape: torch.empty(shape, dtype=torch.long, device=META),
            kept=None if self.layout.recurrent is None else np.array(step.kept),
            logit_index=np.arange(step.logits),
        )


def dense_scheme(dtype: torch.dtype) -> Scheme:
    return next(SCHEMES[name] for name, stored in DTYPES.items() if stored == dtype)


def _requested(scheme: str | None, dtype: torch.dtype) -> RequestedShapes:
    vectors = dense_scheme(dtype)
    if scheme is not None and scheme not in SCHEMES:
        raise ConfigError(f"scheme={scheme!r} is unknown; use one of {', '.join(SCHEMES)}.")
    matrices = vectors if scheme is None else SCHEMES[scheme]

    def choose(name: str, shape: tuple[int, ...]) -> Scheme:
        return matrices if len(shape) == 2 and shape[-1] % matrices.block == 0 else vectors

    return RequestedShapes(choose)
