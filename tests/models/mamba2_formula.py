"""Mamba-2 written out in NumPy's float64, from the paper's dual form (arXiv 2405.21060): an oracle that shares no code
with the engine and that no version of transformers moves.

With H heads in G groups, head h reads B and C of group h G // H (sections 5.2 and 8.1 of the paper: heads of a group
are adjacent, as heads of queries are in grouped attention), and the gated norm takes each group's channels by
themselves, as the authors' code does (`group_size = d_ssm // ngroups`). Older versions of transformers take one mean
over all channels, which is another model when G > 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray[Any, np.dtype[np.float64]]


def tensors_of(folder: Path) -> dict[str, Array]:
    return {name: found.astype(np.float64) for name, found in load_file(folder / "model.safetensors").items()}


def rms(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def mixer(x: Array, w: Mapping[str, Array], sizes: Mapping[str, Any], norm_groups: int) -> Array:
    """x (tokens, hidden), normed."""
    tokens, heads, size = len(x), sizes["num_heads"], sizes["head_dim"]
    groups, state = sizes["n_groups"], sizes["state_size"]
    inner, shared = heads * size, groups * state
    gate, mixed, dt = np.split(x @ w["in_proj.weight"].T, [inner, 2 * inner + 2 * shared], axis=1)

    kernel = w["conv1d.weight"][:, 0]  # (channels, width); the last column meets the token itself
    width = kernel.shape[1]
    past = np.concatenate((np.zeros((width - 1, mixed.shape[1])), mixed))
    mixed = silu(sum(past[i : i + tokens] * kernel[:, i] for i in range(width)) + w["conv1d.bias"])

    u, b, c = np.split(mixed, [inner, inner + shared], axis=1)
    u, b, c = u.reshape(tokens, heads, size), b.reshape(tokens, groups, state), c.reshape(tokens, groups, state)
    step = np.log1p(np.exp(dt + w["dt_bias"]))  # the usual limits, 0 and infinity, cut nothing off
    decay = np.cumsum(step * -np.exp(w["A_log"]), axis=0)  # the logarithm of the product of all decays so far
    y = np.empty_like(u)
    causal = np.tril(np.ones((tokens, tokens), bool))
    for head in range(heads):
        group = head * groups // heads
        between = np.where(causal, decay[:, None, head] - decay[None, :, head], -np.inf)
        weights = (c[:, group] @ b[:, group].T) * np.exp(between)
        y[:, head] = weights @ (step[:, head, None] * u[:, head]) + w["D"][head] * u[:, head]

    gated = (y.reshape(tokens, inner) * silu(gate)).reshape(tokens, norm_groups, -1)
    return (rms(gated, sizes["layer_norm_epsilon"]).reshape(tokens, inner) * w["norm.weight"]) @ w["out_proj.weight"].T


def logits(tensors: Mapping[str, Array], config: Mapping[str, Any], ids: Sequence[int], norm_groups: int = 0) -> Array:
    """`norm_groups`: parts of a row that the gated norm takes by themselves, if not the groups of heads."""
    eps = config["layer_norm_epsilon"]
    x = tensors["backbone.embeddings.weight"][list(ids)]
    for layer in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{layer}."
        own = {name.removeprefix(f"{at}mixer."): w for name, w in tensors.items() if name.startswith(f"{at}mixer.")}
        normed = rms(x, eps) * tensors[f"{at}norm.weight"]
        x = x + mixer(normed, own, config, norm_groups or config["n_groups"])
    return (rms(x, eps) * tensors["backbone.norm_f.weight"]) @ tensors["lm_head.weight"].T


def greedy(tensors: Mapping[str, Array], config: Mapping[str, Any], prompt: Sequence[int], count: int) -> list[int]:
    """The tokens of greedy decoding; the best one leads by more than 1e-3 each time."""
    ids = list(prompt)
    for _ in range(count):
        last = logits(tensors, config, ids)[-1]
        second, best = np.argsort(last)[-2:]
        assert last[best] - last[second] > 1e-3, "choose another prompt: these tokens prove nothing"
        ids.append(int(best))
    return ids[len(prompt) :]
