"""Medusa heads in training: residual blocks on the frozen model's hidden state, projected by rows of its own head.

Head k learns the distribution that the model itself has k + 1 places later, restricted to the reduced vocabulary: the
model's hidden state there gives it without any stored logits. The blocks begin at zero, so each head begins as the
model's own head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from bankfull.assembly import Assembled
from bankfull.ops.cost import Cost
from bankfull.train.states import Examples
from bankfull.train.trainer import RANKS, Acceptance
from bankfull.weights.medusa import MedusaHeads, write_heads
from bankfull.weights.quantize import quantize

LOSS_DECAY = 0.8
"""Weight of a head's loss relative to that of the head before it."""


class MedusaTrainer:
    name = "medusa"
    taps: tuple[int, ...] = ()

    def __init__(
        self, loaded: Assembled, heads: int, layers: int, vocabulary: list[int], about: Mapping[str, Any]
    ) -> None:
        """`about`: the recipe, for config.json."""
        model, self._device = loaded.model, loaded.device
        device = self._device.torch
        self.heads, self._vocab, self._about = heads, model.vocab, about
        self._ids = torch.tensor(vocabulary, device=device)
        self._reduced = torch.full((model.vocab,), -1, device=device)
        """The place of each token id in the reduced vocabulary; -1 for the others."""
        self._reduced[self._ids] = torch.arange(len(vocabulary), device=device)
        self._autocast = device.type == "cuda"
        dtype = torch.bfloat16 if self._autocast else torch.float32
        stored = model.head.stored().rows(self._ids)
        self._rows, self._row_bytes = stored.dequantize(dtype).clone(), stored.nbytes
        size = self._rows.shape[1]
        self._blocks = [
            (torch.zeros(heads, size, size, device=device), torch.zeros(heads, size, device=device))
            for _ in range(layers)
        ]
        if layers > 1:  # with zeros everywhere, deeper blocks would all get the same gradient
            generator = torch.Generator().manual_seed(0)
            for weight, _ in self._blocks:
                weight += torch.randn(weight.shape, generator=generator).to(device) * (0.01 * size**-0.5)
        for parameter in self.parameters().values():
            parameter.requires_grad_()

    def parameters(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for j, (weight, bias) in enumerate(self._blocks):
            named |= {f"{j}.weight": weight, f"{j}.bias": bias}
        return named

    def loss(self, examples: Examples) -> Tensor:
        lengths = [len(one.answer) + 1 for one in examples.sequences]
        states = self._answers(examples)
        total, weight = states.new_zeros((), dtype=torch.float32), 0.0
        with torch.autocast(self._device.kind, torch.bfloat16, enabled=self._autocast):
            with torch.no_grad():
                wanted = self._scores(states).float().softmax(-1)
            for k in range(self.heads):
                at = self._positions(lengths, 2 + k)
                scores = self._scores(self._head(states[at], k)).float()
                entropy = -(wanted[at + 1 + k] * scores.log_softmax(-1)).sum(-1).mean()
                total, weight = total + LOSS_DECAY**k * entropy, weight + LOSS_DECAY**k
        return total / weight

    @torch.no_grad()
    def ranks(self, examples: Examples) -> Tensor:
        lengths = [len(one.answer) + 1 for one in examples.sequences]
        states = self._answers(examples)
        written = self._ship(np.concatenate([(one.prompt[-1], *one.answer) for one in examples.sequences]))
        at = self._positions(lengths, 1 + self.heads)
        ranks = []
        with torch.autocast(self._device.kind, torch.bfloat16, enabled=self._autocast):
            for k in range(self.heads):
                scores = self._scores(self._head(states[at], k)).float()
                place = self._reduced[written[at + 2 + k]]
                written_score = scores.gather(1, place.clamp_min(0)[:, None])
                rank = (scores > written_score).sum(-1).clamp_max(RANKS)
                ranks.append(torch.where(place < 0, RANKS, rank))
        return torch.stack(ranks, 1)

    def draft_cost(self, depth: int) -> Cost:
        """All heads run at once, whatever the depth."""
        inner, outer = self._rows.shape[1], len(self._ids)
        block = quantize(self._blocks[0][0][0], "q8_0").nbytes if inner % 32 == 0 else 2 * inner * inner
        blocks = self.heads * len(self._blocks)
        flops = 2.0 * inner * (blocks * inner + self.heads * outer)
        return Cost(flops, self._row_bytes + blocks * block, 4.0 * self.heads * outer)

    def save(self, folder: Path, acceptance: Acceptance) -> list[Path]:
        stored = torch.bfloat16
        blocks = [
            [(weight[k].detach().to(stored), bias[k].detach().to(stored)) for weight, bias in self._blocks]
            for k in range(self.heads)
        ]
        heads = MedusaHeads(blocks, self._vocab, None, self._ids, acceptance.by_rank, folder.name)
        return write_heads(heads, folder, self._about)

    def _answers(self, examples: Examples) -> Tensor:
        """The states from the last token of each prompt on."""
        keep, first = [], 0
        for one in examples.sequences:
            keep.append(np.arange(first + len(one.prompt) - 1, first + len(one)))
            first += len(one)
        states = examples.states[self._ship(np.concatenate(keep))]
        return states if self._autocast else states.float()

    def _positions(self, lengths: list[int], ahead: int) -> Tensor:
        """Positions that `ahead` others of their sequence follow."""
        starts = np.cumsum([0, *lengths[:-1]])
        parts = [start + np.arange(max(0, n - ahead)) for start, n in zip(starts, lengths, strict=True)]
        return self._ship(np.concatenate(parts))

    def _ship(self, numbers: np.ndarray) -> Tensor:
        ship = self._device.ship
        numbers = numbers.astype(np.int64)
        return torch.from_numpy(numbers) if ship is None else ship(numbers)

    def _head(self, states: Tensor, k: int) -> Tensor:
        x = states
        for weight, bias in self._blocks:
            x = x + silu(torch.nn.functional.linear(x, weight[k], bias[k]))
        return x

    def _scores(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._rows)
