"""The state of sequences on a context rank: its share of the pages, under the page numbers that all ranks use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.pages.body import Segment
from bankfull.ranks.group import RankGroup
from bankfull.ranks.page_share import PageShare
from bankfull.state.spec import Layout
from bankfull.state.storage import Storage
from bankfull.types import Transfer


class SpreadStorage(Storage):
    """Copies between pages of different ranks pass through the group, so all ranks make them, in the same order."""

    def __init__(self, layout: Layout, pages: int, slots: int, device: torch.device, group: RankGroup) -> None:
        """`pages`: of all ranks together."""
        self.share, self.group = PageShare(group.size, group.index), group
        super().__init__(layout, self.share.frames(pages), slots, device)

    def frame(self, page: int) -> int:
        return int(self.share.frame(page))

    def transfer(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            src, dst = transfer.src.place, transfer.dst.place
            content = self.frames[self.share.frame(src) if self.share.owns(src) else 0]
            if src % self.share.ranks != dst % self.share.ranks:
                content = self.group.all_gather(content)[src % self.share.ranks]
            if self.share.owns(dst):
                self.frames[self.share.frame(dst)].copy_(content)

    def poison(self, pages: Iterable[int], slots: Iterable[int] = ()) -> None:
        super().poison([self.share.frame(page) for page in pages if self.share.owns(page)], slots)

    def _here(self, slots: Tensor, page_tokens: int) -> tuple[Tensor, Tensor]:
        """Frames and offsets of slots; frame 0 where another rank has the page."""
        page = slots // page_tokens
        frame = torch.where(self.share.owns(page), self.share.frame(page), torch.zeros_like(page))
        return frame, slots % page_tokens

    def move(self, segments: Sequence[Segment], page_tokens: int, source: Tensor, target: Tensor) -> None:
        """`move_tokens` of slots that any rank may have. All are read before any is written."""
        views = [
            self.frames[:, first : first + page_tokens * size].unflatten(1, (page_tokens, size))
            for first, size in segments
        ]
        read = torch.cat([view[self._here(source, page_tokens)] for view in views], -1)
        owner = source // page_tokens % self.share.ranks
        moved = self.group.all_gather(read).gather(0, owner[None, ..., None].expand(1, *read.shape))[0]
        there = self._here(target, page_tokens)
        for view, part in zip(views, moved.split([size for _, size in segments], -1), strict=True):
            view[there] = part


def storage_for(model: Any, layout: Layout, pages: int, slots: int, device: torch.device) -> Storage:
    """The state of a model's sequences on this rank. `pages`: of all ranks together, where they share them."""
    share = getattr(model, "share", None)
    group = None if share is None else share.pages
    return (
        Storage(layout, pages, slots, device) if group is None else SpreadStorage(layout, pages, slots, device, group)
    )
