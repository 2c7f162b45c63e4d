"""Weights of a running engine, replaced between two steps by those of another source of the same model.

A write has two phases. The new weights are staged beside the steps: a second model is built as the first one was, and
each tensor of the running one gets its twin there (`runtime.twins`). Then, between two steps, the twins' content is
copied over. Addresses stay, so tapes and CUDA graphs stay; what was computed with the old weights is not found again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bankfull.assembly import Assembled
from bankfull.building import ran_out_of_memory
from bankfull.choices import WRITING
from bankfull.errors import ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops.registry import Kit
from bankfull.precision import as_read, choose_dtype
from bankfull.quantize.at_load import as_multiplied
from bankfull.runtime.forward import HoldsWeights, eager_of
from bankfull.runtime.memory import shown
from bankfull.runtime.refused import refuse_other_format
from bankfull.runtime.twins import Twins, UnlikeTwins, tensors_of, twins_of
from bankfull.weights.fingerprint import fingerprint_beside, weights_stamp
from bankfull.weights.given_source import GivenTensors
from bankfull.weights.locate import locate
from bankfull.weights.own_memory import make_own, pages_of_files, read_ahead
from bankfull.weights.source import ModelFiles, TensorSource, open_model
from bankfull.weights.store import give_up_writing

Weights = str | Path | Mapping[str, Tensor]
"""A model by its name or path, or tensors by their names in the model."""
GIVEN = "the given tensors"
WAY_OUT = "start a new engine with it instead."


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """What a write did."""

    generation: int
    """How often the engine's weights were written so far."""
    nbytes: int
    """Bytes that were overwritten."""
    staged_seconds: float
    """Reading and laying out the new weights, beside the steps."""
    paused_seconds: float
    """Between two steps, while nothing ran."""


@dataclass(slots=True)
class StagedWeights:
    """New weights beside an engine that is ready for them."""

    assembled: Assembled
    source: tuple[ModelFiles, TensorSource] | None
    """The files that are the engine's from then on, and how they are read; None for tensors in the caller's memory,
    which would stay there."""
    twins: Twins
    identity: str
    """Equal for equal files, and for nothing else."""
    seconds: float

    def write(self, restart: bool) -> WrittenWeights:
        """Called on the thread that runs the engine, between two steps. `restart`: running sequences are computed
        anew."""
        engine = self.assembled.engine
        paused = engine.change_weights(self._commit, self.identity, restart)
        return WrittenWeights(engine.generation, self.twins.nbytes, self.seconds, paused)

    def _commit(self) -> None:
        give_up_writing()
        assembled = self.assembled
        assembled.device.launch(self.twins.commit).wait()
        if self.source is not None:
            assembled.files, source = self.source
            assembled.build = replace(assembled.build, source=source)


def stage_weights(assembled: Assembled, weights: Weights) -> StagedWeights:
    """Build a second model beside the running one. Steps may go on meanwhile. Raises ConfigError or ModelError in one
    sentence where the weights cannot be written."""
    begun, run, device = perf_counter(), assembled.run, assembled.device
    WRITING.refuse("write_weights", run.mesh.traits, layout=run.mesh)
    stored, identity = _opened(assembled, weights)
    name = GIVEN if isinstance(weights, Mapping) else stored.path.name
    files = as_multiplied(stored, run, device, choose_dtype(run.dtype, stored, device.kind))
    source, own = as_read(files, run, device.kind).source, assembled.build
    build = replace(own, source=source, kit=Kit(own.kit.device, own.kit.prefer), elsewhere=set())
    _refuse_other_tensors(own.source, build.source, name)
    _refuse_without_memory(assembled)
    try:
        model = build_model(files.config, build)
        twins = twins_of(assembled.model, model, lambda: _captured(assembled, model, build))
    except UnlikeTwins as unlike:
        raise ConfigError(f"{name} cannot take the place of the running weights: {unlike}; {WAY_OUT}") from None
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        raise ConfigError(f"Memory ran out while {name} was read beside the running weights; {WAY_OUT}") from error
    _settle(assembled, twins)
    kept = None if isinstance(weights, Mapping) else (files, source)
    return StagedWeights(assembled, kept, twins, identity(), perf_counter() - begun)


def _opened(assembled: Assembled, weights: Weights) -> tuple[ModelFiles, Callable[[], str]]:
    """The files, and what makes their identity."""
    if isinstance(weights, Mapping):
        tensors = {name: one.detach() if isinstance(one, Tensor) else one for name, one in weights.items()}
        return replace(assembled.files, source=GivenTensors(tensors), opened=None), lambda: secrets.token_hex(16)
    path = locate(str(weights))
    before, fingerprint = weights_stamp(path), fingerprint_beside(path)
    files = open_model(path)
    refuse_other_format(files, assembled.run.stored)

    def identity() -> str:
        made = fingerprint()
        if weights_stamp(path) != before:
            raise ModelError(f"The files of {path.name} have changed while they were read; write them again.")
        return made

    return files, identity


def _refuse_other_tensors(own: TensorSource, new: TensorSource, name: str) -> None:
    there, here = set(new.names()), own.names()
    missing, more = [tensor for tensor in here if tensor not in there], sorted(there.difference(here))
    if missing or more:
        which = f"lacks the tensor {missing[0]}" if missing else f"has the tensor {more[0]}, which they lack"
        raise ConfigError(f"{name} cannot take the place of the running weights: it {which}; {WAY_OUT}")
    for tensor in here:
        for what, before, after in (
            ("the shape", list(own.shape(tensor)), list(new.shape(tensor))),
            ("the scheme", own.scheme(tensor).name, new.scheme(tensor).name),
        ):
            if before != after:
                raise ConfigError(
                    f"{name} cannot take the place of the running weights: its tensor {tensor} has {what} {after} "
                    f"instead of {before}; {WAY_OUT}"
                )


def _refuse_without_memory(assembled: Assembled) -> None:
    tensors = tensors_of(assembled.model)
    needed = sum(tensor.nbytes for tensor in tensors) + sum(last - first for first, last in pages_of_files(tensors))
    free = assembled.device.free_memory()
    if needed > free:
        raise ConfigError(
            f"A second copy of the weights takes {shown(needed)} until it is written, and {shown(free)} are free on "
            f"{assembled.device.torch}: give the engine less memory, or start a new one."
        )


def _captured(assembled: Assembled, model: Decoder, build: Build) -> list[tuple[Any, Any]]:
    """Weights as a captured step holds them, where that is in another form than the model does."""
    runner = assembled.engine.runner
    if not isinstance(runner.run_model, HoldsWeights):
        return []
    return runner.run_model.weights_beside(
        eager_of(model, runner.layout, runner.storage.layers, runner.strategy), build.kit
    )


def _settle(assembled: Assembled, twins: Twins) -> None:
    """Everything that would make the copy between two steps slow, or impossible."""
    try:
        make_own(pages_of_files(pair.own for pair in twins.tensors))
    except OSError as error:
        raise ConfigError(
            f"Mapped weights could not be replaced by memory of the engine's own ({error.strerror}): start a new "
            "engine instead."
        ) from error
    late = (part for _, new in twins.late for part in new.values())
    read_ahead(pages_of_files([*late, *(pair.new for pair in twins.tensors)]))
    if assembled.device.kind == "cuda":
        torch.cuda.synchronize(assembled.device.torch)
