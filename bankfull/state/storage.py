"""The state of sequences as tensors: a buffer of equal frames for all paged groups, and slots for recurrent states.

A frame holds, for every member of a group and every tensor of the member, `page_tokens` tokens. The groups view the
same bytes with their own shapes, so any free frame serves any group.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

import torch
from torch import Tensor

from bankfull.state.spec import ITEM_BYTES, Layout, Member, TensorSpec
from bankfull.types import Transfer

StateTensors = dict[str, Tensor]
"""One state by tensor name. Paged: (frames, page_tokens, *shape). Recurrent: (slots, *shape)."""
LayerStates = tuple[StateTensors, ...]
"""The states of one layer, in the order in which its mixer declares them."""


class Storage:
    def __init__(self, layout: Layout, frames: int, slots: int, device: torch.device) -> None:
        self.layout = layout
        # Never zeroed: on a CPU the system commits memory only where it is first written.
        self.frames = torch.empty(frames + 1, layout.frame_bytes, dtype=torch.uint8, device=device)
        states: dict[Member, StateTensors] = {}
        self.segments: list[list[tuple[int, int]]] = [[] for _ in layout.paged]
        """Per paged group, for each tensor: where its tokens begin in a frame, and the bytes of a token."""
        for group, segments in zip(layout.paged, self.segments, strict=True):
            states |= {member: {} for member in group.members}
            offset = 0
            # Wide numbers first: each tensor then begins at a multiple of its numbers' size, whatever the shapes are.
            for item in sorted({ITEM_BYTES[spec.dtype] for spec in group.tensors}, reverse=True):
                for member, spec in product(group.members, group.tensors):
                    if ITEM_BYTES[spec.dtype] == item:
                        states[member][spec.name] = self._paged_view(spec, group.page_tokens, offset)
                        segments.append((offset, spec.nbytes))
                        offset += group.page_tokens * spec.nbytes
        self.slots: list[Tensor] = []
        if layout.recurrent is not None:
            for member, specs in zip(layout.recurrent.members, layout.recurrent.tensors, strict=True):
                # Slot 0 must read as zeros: it is the state before the first token.
                states[member] = {
                    s.name: torch.zeros(slots + 1, *s.shape, dtype=getattr(torch, s.dtype), device=device)
                    for s in specs
                }
                self.slots += states[member].values()
        # A layer whose state another rank keeps has no tensors here.
        self.layers: list[LayerStates] = [tuple(states.get(owner, {}) for owner in owners) for owners in layout.owners]

    def _paged_view(self, spec: TensorSpec, page_tokens: int, offset: int) -> Tensor:
        item = ITEM_BYTES[spec.dtype]
        typed = self.frames.view(getattr(torch, spec.dtype))
        inner = [prod(spec.shape[i + 1 :]) for i in range(len(spec.shape))]
        return typed.as_strided(
            (self.frames.shape[0], page_tokens, *spec.shape),
            (self.layout.frame_bytes // item, prod(spec.shape), *inner),
            offset // item,
        )

    def frame(self, page: int) -> int:
        """Where a page lies, or would lie if it were here."""
        return page

    def transfer(self, transfers: Iterable[Transfer]) -> None:
        """Copy pages of the device, in order with its steps."""
        for transfer in transfers:
            self.frames[transfer.dst.place].copy_(self.frames[transfer.src.place])

    def poison(self, pages: Iterable[int], slots: Iterable[int] = ()) -> None:
        """Fill free places with NaN, so that a stale read shows in its result.

        Bytes of 0xFF are NaN in every type of float; rounded pages show it by their scales.
        """
        if self.frames.device.type == "cpu":
            self.frames.numpy()[list(pages)] = 0xFF  # whole rows; torch would fill byte by byte
        else:
            self.frames[torch.tensor(list(pages), dtype=torch.long, device=self.frames.device)] = 0xFF
        index = torch.tensor(list(slots), dtype=torch.long, device=self.frames.device)
        for tensor in self.slots:
            tensor[index] = float("nan")
