"""Sequences and query tiles of a launch, as small integer arrays copied to the device.

They depend only on q_start, which is exact on the host; sequence lengths are read on the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.triton.launch import stream_of
from bankfull.ops.triton.rows import contiguous_rows


class Sequences(NamedTuple):
    """The sequences of a launch, on the device."""

    table: Tensor
    """(sequences, pages) frames."""
    starts: Tensor | None
    """(sequences + 1) int32: first new tokens."""
    lengths: Tensor
    """(sequences) int32."""
    slots: Tensor | None = None
    """(tokens) places of the new tokens in their pages."""
    chosen: Tensor | None = None
    """The sequences to attend to; None: all."""
    tiles: Tensor | None = None
    """(tiles, 4) int32: as in `tile_map`."""
    ancestors: Tensor | None = None
    """(tokens) int64: as in `PagedMeta`."""
    begins: Tensor | None = None
    """(tokens) int32: the first key in each token's window, in partial attention with a window."""
    ends: Tensor | None = None
    """(tokens) int32: the key after the last one that each token sees, in partial attention."""
    past_lengths: Tensor | None = None
    """(sequences) int32: keys before the step's tokens, in partial attention."""

    @classmethod
    def of(cls, meta: PagedMeta, device: torch.device) -> Sequences:
        starts = to_device(meta.q_start, device) if meta.starts is None else meta.starts
        lengths = to_device(meta.kv_len, device) if meta.lengths is None else meta.lengths
        return cls(contiguous_rows(meta.pages), starts, lengths, meta.slots, ancestors=meta.ancestors)

    def in_tiles(self, tiles: Tensor) -> Sequences:
        """These tiles of sequences without trees."""
        return self._replace(starts=None, slots=None, tiles=tiles, ancestors=None)


def tile_map(q_start: np.ndarray, kv_len: np.ndarray, sequences: np.ndarray, tokens: int) -> np.ndarray:
    """(sequence, first token, tokens, tokens from there to the sequence's end) of each tile, those with the most keys
    first, so that programs that start last are short. `kv_len` affects only this order."""
    widths = np.diff(q_start)
    tiles = -(-widths[sequences] // tokens)
    sequence = np.repeat(sequences, tiles)
    within = (np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    left = widths[sequence] - within
    table = np.stack((sequence, q_start[sequence] + within, np.minimum(left, tokens), left), 1)
    return table[np.argsort(left - kv_len[sequence], kind="stable")].astype(np.int32)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device without synchronizing; pinned memory is freed by its own event."""
    here = torch.from_numpy(np.array(values, dtype=np.int32))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _bytes(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, dtype=np.int64).tobytes()


@lru_cache(maxsize=16)
def _device_tiles(
    q_start: bytes, kv_len: bytes, sequences: bytes, tokens: int, device: torch.device, stream: int
) -> Tensor:
    arrays = [np.frombuffer(part, np.int64) for part in (q_start, kv_len, sequences)]
    return to_device(tile_map(arrays[0], arrays[1], arrays[2], tokens), device)


@lru_cache(maxsize=16)
def _device_sequences(sequences: bytes, device: torch.device, stream: int) -> Tensor:
    return to_device(np.frombuffer(sequences, np.int64), device)


def device_tiles(
    q_start: np.ndarray, kv_len: np.ndarray, sequences: np.ndarray, tokens: int, device: torch.device
) -> Tensor:
    """All layers of a step use the same tiles; only the first call copies them."""
    return _device_tiles(_bytes(q_start), _bytes(kv_len), _bytes(sequences), tokens, device, stream_of(device))


def device_sequences(sequences: np.ndarray, device: torch.device) -> Tensor:
    return _device_sequences(_bytes(sequences), device, stream_of(device))
