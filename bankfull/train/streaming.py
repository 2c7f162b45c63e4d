"""Streams in training: adapters of a frozen model's top layers, by the model's own distributions.

Stream j learns the distribution that the model itself has j places after the newest token. The frozen top layers give
it: they run once per batch over the main stream, whose keys and values the streams read. All maps begin at zero, so
each stream begins as a copy of the main stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from bankfull.assembly import Assembled
from bankfull.decode.streams import CANDIDATES, after, enter
from bankfull.layers.adapted import Adapter, Product
from bankfull.ops.cost import Cost
from bankfull.runtime.batch import bare_batch
from bankfull.train.states import Examples
from bankfull.train.stream_layers import PositionGrid, TopLayers
from bankfull.train.trainer import RANKS, Acceptance
from bankfull.weights.streams import SITES, Map, StreamWeights, write_streams

LOSS_DECAY = 0.8
"""Weight of a stream's loss relative to that of the stream before it."""
ENTRY_RANKS = 4
"""Rank of the entry map, in ranks of the adapters."""
POSITIONS = {"cpu": 64, "cuda": 512}
"""Positions of an answer whose streams run in a step, at most."""


class StreamTrainer:
    name = "streaming"

    def __init__(
        self, loaded: Assembled, streams: int, layers: int, rank: int, vocabulary: list[int], about: Mapping[str, Any]
    ) -> None:
        """`rank`: of the adapters. `about`: the recipe, for config.json."""
        model, self._device = loaded.model, loaded.device
        device = self._device.torch
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._top = TopLayers(loaded, layers, self._dtype)
        self.taps: tuple[int, ...] = (len(model.blocks) - layers,)
        self.streams, self._vocab, self._about, self._embed = streams, model.vocab, about, model.embed
        self._cap = model.head.cap
        self._ids = torch.tensor(vocabulary, device=device)
        self._reduced = torch.full((model.vocab,), -1, device=device)
        """The place of each token id in the reduced vocabulary; -1 for the others."""
        self._reduced[self._ids] = torch.arange(len(vocabulary), device=device)
        self._head = model.head.stored()
        self._rows = self._head.rows(self._ids).dequantize(self._dtype).clone()
        self._most = min(CANDIDATES, len(vocabulary))
        self._parameters = self._begin(model.hidden, rank)

    def _begin(self, size: int, rank: int) -> dict[str, Tensor]:
        generator, device = torch.Generator().manual_seed(0), self._device.torch
        parameters = {"embeddings": torch.zeros(self.streams, size)}

        def low_rank(name: str, inner: int, outer: int, rank: int) -> None:
            parameters[f"{name}.down"] = torch.randn(rank, inner, generator=generator) * inner**-0.5
            parameters[f"{name}.up"] = torch.zeros(outer, rank)

        low_rank("entry", 2 * size, size, ENTRY_RANKS * rank)
        low_rank("exit", 2 * size, size, rank)
        for i, heads in enumerate(self._top.heads):
            low_rank(f"layers.{i}.qkv", size, (heads.count + 2 * heads.kv) * heads.size, rank)
            low_rank(f"layers.{i}.out", heads.count * heads.size, size, rank)
            low_rank(f"layers.{i}.feed", size, size, rank)
        return {name: tensor.to(device).requires_grad_() for name, tensor in parameters.items()}

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def loss(self, examples: Examples) -> Tensor:
        grid, main, hidden, tokens = self._run(examples)
        total, weight = main.new_zeros((), dtype=torch.float32), 0.0
        for j in range(self.streams):
            at, later = self._targets(examples, grid, j)
            with torch.no_grad():
                wanted = self._scores(main[later]).softmax(-1)
            states = [hidden[at, j]]
            if j:
                states.append(self._after(states[0], tokens[later]))
            for each in states:
                entropy = -(wanted * self._scores(each).log_softmax(-1)).sum(-1).mean()
                total, weight = total + LOSS_DECAY**j * entropy, weight + LOSS_DECAY**j
        return total / weight

    @torch.no_grad()
    def ranks(self, examples: Examples) -> Tensor:
        """The candidates of a stream are ranked as in a tree: by how well they follow the token before them."""
        grid, _, hidden, tokens = self._run(examples)
        at, later = self._targets(examples, grid, self.streams - 1)
        first, ranks = later - (self.streams - 1), []
        for j in range(self.streams):
            states = hidden[at, j]
            best = self._scores(states).topk(self._most, -1)
            values = best.values
            if j:
                follows = self._after(states, tokens[first + j])
                values = self._capped((self._rows[best.indices] @ follows[:, :, None])[:, :, 0].float())
            is_written = best.indices == self._reduced[tokens[first + j + 1]][:, None]
            rank = (values > values.masked_fill(~is_written, -torch.inf).amax(-1, keepdim=True)).sum(-1)
            ranks.append(torch.where(is_written.any(-1), rank, RANKS))
        return torch.stack(ranks, 1)

    def draft_cost(self, depth: int) -> Cost:
        size, outer = self._rows.shape[1], len(self._ids)
        adapters = sum(tensor.numel() for tensor in self._parameters.values())
        flops = 2.0 * depth * (self._top.numbers + adapters + size * outer)
        # As many bytes per weight as the head has; the adapters have two.
        read = (self._top.numbers + size * outer) * self._head.nbytes / (self._vocab * size) + 2 * adapters
        return Cost(flops, read, 4.0 * depth * outer)

    def save(self, folder: Path, acceptance: Acceptance) -> list[Path]:
        stored = {name: tensor.detach().to(torch.bfloat16) for name, tensor in self._parameters.items()}
        weights = StreamWeights(
            stored["embeddings"],
            (stored["entry.down"], stored["entry.up"]),
            (stored["exit.down"], stored["exit.up"]),
            self._maps(stored),
            self._ids,
            self._vocab,
            acceptance.by_rank,
            folder.name,
        )
        return write_streams(weights, folder, self._about)

    def _maps(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Map]]:
        return [
            {site: (tensors[f"layers.{i}.{site}.down"], tensors[f"layers.{i}.{site}.up"]) for site in SITES}
            for i in range(len(self._top.heads))
        ]

    def _run(self, examples: Examples) -> tuple[PositionGrid, Tensor, Tensor, Tensor]:
        """The grid; the main stream's last hidden states (sequences * length, d); those of the streams (sequences *
        positions, streams, d); token ids (sequences * length)."""
        grid, index, tokens = self._placed(examples)
        main = examples.states[:, -self._rows.shape[1] :].to(self._dtype)
        main = main.new_zeros(grid.sequences * grid.length, main.shape[1]).index_copy_(0, index, main)
        with torch.no_grad():
            newest, positions = self._lines(grid), grid.newest.flatten()
            embedded = self._embed(bare_batch(tokens[newest], positions)).to(self._dtype)
        entry = self._adapter("entry")
        entering = enter(main[newest - 1], embedded, entry, self._parameters["embeddings"].to(self._dtype))
        last = self._top.run_main(main, grid)
        hidden = self._top.run_streams(entering.flatten(0, 1), grid, self._maps(self._parameters), self._product)
        return grid, last, hidden.unflatten(0, (-1, self.streams)), tokens

    def _placed(self, examples: Examples) -> tuple[PositionGrid, Tensor, Tensor]:
        """The grid; the place of each state, and the token ids, in sequences that are padded to one length."""
        lengths = [len(one) for one in examples.sequences]
        longest = max(lengths)
        index = np.concatenate([i * longest + np.arange(n) for i, n in enumerate(lengths)])
        tokens = np.zeros(len(lengths) * longest, np.int64)
        tokens[index] = np.concatenate([(*one.prompt, *one.answer) for one in examples.sequences])
        newest = [self._newest(one.prompt, one.answer) for one in examples.sequences]
        widest = max(len(each) for each in newest)
        padded = np.stack([np.pad(each, (0, widest - len(each)), mode="edge") for each in newest])
        grid = PositionGrid(len(lengths), longest, self._ship(padded), self.streams)
        return grid, self._ship(index), self._ship(tokens)

    def _newest(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> np.ndarray:
        """Tokens of the answer after which streams run: those with a token to predict, or evenly some of them."""
        count = max(1, len(answer) - 1)
        stride = -(-count // POSITIONS[self._device.kind])
        return len(prompt) + np.arange(sum(answer) % stride if stride > 1 else 0, count, stride)

    def _lines(self, grid: PositionGrid) -> Tensor:
        """(sequences * positions) the newest tokens as places in the padded sequences."""
        first = torch.arange(grid.sequences, device=grid.newest.device)[:, None] * grid.length
        return (first + grid.newest).flatten()

    def _targets(self, examples: Examples, grid: PositionGrid, j: int) -> tuple[Tensor, Tensor]:
        """Positions of the grid whose stream j has a token to predict, and the places before these tokens."""
        widest, at, later = grid.newest.shape[1], [], []
        for i, one in enumerate(examples.sequences):
            newest = self._newest(one.prompt, one.answer)
            kept = np.flatnonzero(newest + j + 1 < len(one))
            at.append(i * widest + kept)
            later.append(i * grid.length + newest[kept] + j)
        return self._ship(np.concatenate(at)), self._ship(np.concatenate(later))

    def _ship(self, numbers: np.ndarray) -> Tensor:
        ship = self._device.ship
        numbers = numbers.astype(np.int64)
        return torch.from_numpy(numbers) if ship is None else ship(numbers)

    def _product(self, weight: Tensor) -> Product:
        return partial(linear, weight=weight.to(self._dtype))

    def _adapter(self, name: str) -> Adapter:
        down, up = (self._product(self._parameters[f"{name}.{part}"]) for part in ("down", "up"))
        return Adapter(down, up, bent=True)

    def _after(self, states: Tensor, parents: Tensor) -> Tensor:
        return after(states, self._head.rows(parents).dequantize(self._dtype), self._adapter("exit"))

    def _scores(self, states: Tensor) -> Tensor:
        return self._capped(linear(states, self._rows).float())

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)
