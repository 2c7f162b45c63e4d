"""Models whose tokens are divided over ranks, run in steps of several sequences over pages in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ranks.shard import Shard
from bankfull.runtime.batch import placed_batch
from bankfull.runtime.forward import plan_mixers
from bankfull.runtime.spread_storage import storage_for
from bankfull.state.spec import layout_of
from bankfull.weights.source import ModelFiles
from tests.parallel.threads import ThreadRank, on_mesh

CPU = torch.device("cpu")
PAGE = 4
Step = list[tuple[int, int]]
"""Sequences of a step, and how many tokens of each run."""


@dataclass(frozen=True)
class Mesh:
    tp: int = 1
    cp: int = 1
    sp: str = "off"

    def __str__(self) -> str:
        return f"tp{self.tp}-cp{self.cp}-{self.sp}"

    def build(
        self, files: ModelFiles, tp: ThreadRank, cp: ThreadRank, providers: str = "torch", **more: object
    ) -> Decoder:
        build = Build(
            files.source,
            kit_for("cpu", providers),
            torch.float32,
            CPU,
            shard=Shard(tp) if self.tp > 1 else None,
            context=cp if self.cp > 1 else None,
            sequence=self.sp,
            **more,  # type: ignore[arg-type]
        )
        return build_model(files.config, build)


WHOLE = Mesh()


@dataclass
class Sent:
    """What a rank computed, and the bytes that it sent to its tensor and to its context ranks."""

    logits: Tensor
    tp: list[int] = field(default_factory=list)
    cp: list[int] = field(default_factory=list)


def run(
    mesh: Mesh,
    files: Callable[[], ModelFiles],
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Step],
    *,
    seed: int = 0,
    providers: str = "torch",
    tree: Sequence[int] = (),
    **more: object,
) -> list[Sent]:
    """Every rank's logits of all tokens, in the order in which they ran. `tree`: the parent of each token of the last
    step, which has one sequence. `more`: fields of `Build`."""
    opened = [files() for _ in range(mesh.tp * mesh.cp)]

    def work(tp: ThreadRank, cp: ThreadRank) -> Sent:
        model = mesh.build(opened[cp.index * mesh.tp + tp.index], tp, cp, providers, **more)
        hidden = _hidden(model, mesh, sequences, steps, seed, tree)
        sent = list(tp.sent), list(cp.sent)
        return Sent(model.head(hidden), *sent)

    return on_mesh((mesh.tp, mesh.cp), work)


def _hidden(
    model: Decoder,
    mesh: Mesh,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Step],
    seed: int,
    tree: Sequence[int],
) -> Tensor:
    layout = layout_of(model.states(), PAGE)
    wide = [max(-(-len(tokens) // group.page_tokens) for tokens in sequences) for group in layout.paged]
    total = len(sequences) * sum(wide)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)) + 1
    tables = [part.view(len(sequences), -1) for part in order.split([len(sequences) * one for one in wide])]
    storage = storage_for(model, layout, total, 2 * len(sequences), CPU)
    by_pages = mesh.cp > 1 and mesh.sp != "ulysses"
    assert len(storage.frames) == 1 + (-(-total // mesh.cp) if by_pages else total)
    if layout.paged:
        storage.frames.fill_(0xFF)  # what is read without being written is NaN
    done, slot = [0] * len(sequences), [0] * len(sequences)
    found = []
    for step in steps:
        chosen = [i for i, _ in step]
        counts, past = [count for _, count in step], [done[i] for i in chosen]
        tokens = torch.tensor([t for i, count in step for t in sequences[i][done[i] : done[i] + count]])
        slots = None
        if layout.recurrent is not None:
            after = [1 + 2 * i + (slot[i] == 1 + 2 * i) for i in chosen]
            slots = torch.tensor([slot[i] for i in chosen]), torch.tensor(after)
            for i, one in zip(chosen, after, strict=True):
                slot[i] = one
        batch = placed_batch(layout, counts, past, tokens, [table[chosen] for table in tables], slots)
        if tree and step is steps[-1]:
            paths = tree_paths(tree)
            batch.ancestors = torch.tensor([sum(1 << one for one in path) for path in paths])
            batch.positions = torch.tensor([past[0] + len(path) - 1 for path in paths])
        found.append(model.forward(batch, storage.layers, plan_mixers(model, layout, batch)))
        for i, count in step:
            done[i] += count
    return torch.cat(found)


def tree_paths(parents: Sequence[int]) -> list[list[int]]:
    """The tokens on the path to each token of a tree, itself included; the first one's parent is -1."""
    paths: list[list[int]] = []
    for token, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def error(found: Sequence[Sent], expected: Tensor) -> float:
    return max(float((one.logits - expected).abs().max()) for one in found)
