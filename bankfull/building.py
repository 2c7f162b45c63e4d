"""From a model's files to its layers: dtypes and providers are chosen, weights are read, and what is slow is told."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

import torch

from bankfull.build_digest import build_stamp
from bankfull.config import RunConfig
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.placement import Role
from bankfull.models.registry import build_model
from bankfull.ops import kit_for, native
from bankfull.ops.products.activations import TOKEN
from bankfull.ops.registry import Kit
from bankfull.precision import as_read, choose_precision, is_rounded_to_fp8
from bankfull.runtime.device import Device
from bankfull.runtime.memory import shown
from bankfull.state.mask import Mask
from bankfull.weights.fingerprint import known_fingerprint, weights_fingerprint
from bankfull.weights.source import ModelFiles
from bankfull.weights.store import PreparedWeights, in_use, key_of, store_for
from bankfull.weights.widened_source import WidenedSource

log = logging.getLogger("bankfull")

STAMPED = ("layers", "models", "ops", "quantize", "weights")
"""Folders whose code decides what a prepared layout holds."""
PRODUCTS = ("linear", "expert_mlp")
"""First words of the operations that multiply by weights, apart from those that only find the highest output."""
KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def plan_build(files: ModelFiles, run: RunConfig, device: Device, max_len: int = 0) -> Build:
    """The dtypes and providers of a model's build; options that are `auto` are decided here."""
    files = as_read(files, run, device.kind)
    chosen, kit = choose_precision(files, run, device.kind), kit_for(device.kind, run.providers)
    kept = run.evicts()
    evict = None if kept is None else Mask(kept[1], global_tokens=kept[0])
    build = Build(files.source, kit, chosen.dtype, device.torch, run.expand, max_len, chosen.pages, chosen.activations)
    if isinstance(files.source, WidenedSource):
        log.warning(files.source.notice())
    if device.kind != "cpu" and run.activations == "auto" and is_rounded_to_fp8(files):
        log.warning(fp8_notice(chosen.activations.by_row is TOKEN))
    return build if evict is None else replace(build, kv_evict=evict)


def fp8_notice(rounds: bool) -> str:
    """What `quantize="fp8"` means on this GPU."""
    if rounds:
        return (
            "quantize='fp8' is lossy in two ways: weights are rounded to fp8, and activations per token, as in other "
            "engines; activations='float' rounds weights only."
        )
    return "quantize='fp8' rounds weights only (lossy): this GPU has no matrix units for fp8 activations."


def build_weights(files: ModelFiles, build: Build, device: Device) -> Decoder:
    free = device.free_memory()
    store = prepared_weights(files, build) if device.kind == "cpu" else None
    try:
        with in_use(store):
            model = build_model(files.config, build)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The weights of {files.path.name} do not fit: {shown(free)} were free on {device.torch}; quantize the "
            "model, or use a smaller one."
        ) from error
    if store is not None:
        store.keep()
    if build.activations.rounds:
        files.source.release()  # the weights are repacked
    if (notice := slow_layers(build.kit, build.dtype)) is not None:
        log.warning(notice)
    return model


def prepared_weights(files: ModelFiles, build: Build) -> PreparedWeights | None:
    """The layouts of this model that are kept on disk. None for numbers that no file holds as they are, for a part of
    the weights, and where the user wants none."""
    parts = (build.shard, build.stage, build.experts)
    if not files.is_as_stored or any(part is not None for part in parts) or build.placement.roles != set(Role):
        return None
    rule = build.activations
    facts = (
        build_stamp(*STAMPED),
        native.select_isa(),
        build.dtype,
        build.expand,
        rule.dense,
        rule.blocks,
        rule.by_row,
    )
    known = known_fingerprint(files.path)
    return store_for(
        files.path.name,
        lambda: key_of(weights_fingerprint(files.path), *facts),
        None if known is None else key_of(known, *facts),
        maps=len(native.memory_nodes()) < 2,
    )


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. torch has no type of its own for that on a CPU, and every kind of failure is a
    RuntimeError there."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    said = str(error).lower()
    return type(error) is RuntimeError and ("allocate memory" in said or "out of memory" in said)


def slow_layers(kit: Kit, dtype: torch.dtype) -> str | None:
    """Which layers run without a native kernel although there are some, and what to do: one sentence. None: none do."""
    if kit.device != "cpu" or native.status() is not None:
        return None
    counts: Counter[str] = Counter()
    for (operation, scheme), count in kit.bodies.items():
        if operation.startswith(PRODUCTS):
            counts[scheme] += count
    if not counts:
        return None
    schemes = ", ".join(f"{count} of {scheme}" for scheme, count in sorted(counts.items()))
    name = str(dtype).removeprefix("torch.")
    if dtype not in KERNEL_DTYPES:
        way = f"no kernel computes in {name}: use dtype='float32' or leave dtype out"
    elif dtype is torch.bfloat16:
        way = "use activations='bf16', whose kernels multiply bfloat16, or dtype='float32'"
    else:
        way = "no kernel fits their shape; expand=True dequantizes them once, for more memory, if they are quantized"
    return f"{counts.total()} layers run without a native kernel ({schemes}), and may be many times slower: {way}."
