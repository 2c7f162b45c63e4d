"""Which sequences and which tiles of queries a launch covers: small integers that the host knows and ships.

They follow from q_start alone, which is true on the host; how long sequences are is read on the device.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def tile_map(q_start: np.ndarray, kv_len: np.ndarray, sequences: np.ndarray, tokens: int) -> np.ndarray:
    """(sequence, first token, tokens, tokens from there to the sequence's end) of every tile, those with the most keys
    first, because what is started last should be short. `kv_len` decides about this order and nothing else."""
    widths = np.diff(q_start)
    tiles = -(-widths[sequences] // tokens)
    sequence = np.repeat(sequences, tiles)
    within = (np.arange(int(tiles.sum())) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    left = widths[sequence] - within
    found = np.stack((sequence, q_start[sequence] + within, np.minimum(left, tokens), left), 1)
    return found[np.argsort(left - kv_len[sequence], kind="stable")].astype(np.int32)


def ship(values: np.ndarray, device: torch.device) -> Tensor:
    """To the device without waiting for it: pinned memory is freed by its own event."""
    here = torch.from_numpy(np.array(values, dtype=np.int32))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _bytes(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values, dtype=np.int64).tobytes()


@lru_cache(maxsize=16)
def _shipped_tiles(
    q_start: bytes, kv_len: bytes, sequences: bytes, tokens: int, device: torch.device, stream: int
) -> Tensor:
    arrays = [np.frombuffer(part, np.int64) for part in (q_start, kv_len, sequences)]
    return ship(tile_map(arrays[0], arrays[1], arrays[2], tokens), device)


@lru_cache(maxsize=16)
def _shipped_sequences(sequences: bytes, device: torch.device, stream: int) -> Tensor:
    return ship(np.frombuffer(sequences, np.int64), device)


def shipped_tiles(
    q_start: np.ndarray, kv_len: np.ndarray, sequences: np.ndarray, tokens: int, device: torch.device
) -> Tensor:
    """The layers of a step ask for the same tiles one after the other: the first one ships them."""
    return _shipped_tiles(_bytes(q_start), _bytes(kv_len), _bytes(sequences), tokens, device, _stream(device))


def shipped_sequences(sequences: np.ndarray, device: torch.device) -> Tensor:
    return _shipped_sequences(_bytes(sequences), device, _stream(device))
