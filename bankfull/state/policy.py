"""Lifetime rules for each kind of state: which pages stay live, which prefix is reusable, where a chunk should end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from bankfull.state.mask import Mask, Sight
from bankfull.types import Keep

Hit = Callable[[int], bool]
"""Whether the page (or snapshot) that ends after this many tokens is in the cache."""


class GroupPolicy(Protocol):
    def first_live(self, position: int) -> int:
        """The first page that a token at `position` or later can still attend to, besides those that are kept."""
        ...

    def keeps(self, page: int) -> bool:
        """Whether the page stays live although it comes before the first live one."""
        ...

    def reusable(self, hit: Hit, length: int) -> int:
        """The longest prefix, at most `length` tokens, whose state for this group is completely in the cache."""
        ...


class Reusable(Protocol):
    def reusable(self, hit: Hit, length: int) -> int: ...


def longest_reusable(limit: int, rules: Sequence[tuple[Reusable, Hit]]) -> int:
    """The longest prefix of at most `limit` tokens that is reusable by every rule: their greatest fixed point, whatever
    their order."""
    if len(rules) == 1:
        rule, hit = rules[0]
        return rule.reusable(hit, limit)  # a single rule is satisfied with its own result
    length = limit
    while length:
        before = length
        for rule, hit in rules:
            length = rule.reusable(hit, length)
        if length == before:
            break
    return length


class Full:
    """Every page stays live. A prefix is reusable up to its first missing page."""

    def __init__(self, page_tokens: int) -> None:
        self.page = page_tokens

    def first_live(self, position: int) -> int:
        return 0

    def keeps(self, page: int) -> bool:
        return True

    def reusable(self, hit: Hit, length: int) -> int:
        reach = 0
        while reach + self.page <= length and hit(reach + self.page):
            reach += self.page
        return reach


class Window:
    """Only the last `window` tokens are live: a prefix is reusable if the pages of its window are cached."""

    def __init__(self, page_tokens: int, window: int) -> None:
        self.page = page_tokens
        self.window = window

    def first_live(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.page

    def keeps(self, page: int) -> bool:
        return False

    def reusable(self, hit: Hit, length: int) -> int:
        border = length // self.page * self.page
        while border:
            live = self.first_live(border) * self.page
            end = border
            while end > live and hit(end):
                end -= self.page
            if end <= live:
                return border
            # The page that ends at `end` is missing, and every border between needs it: continue before it.
            border = end - self.page
        return 0


class Sparse(Window):
    """A window, and the pages with tokens that every later token sees."""

    def __init__(self, page_tokens: int, mask: Mask) -> None:
        super().__init__(page_tokens, mask.extent)
        self.mask = mask

    def first_live(self, position: int) -> int:
        return self.mask.first_live(position) // self.page

    def keeps(self, page: int) -> bool:
        return self.mask.keeps(page * self.page, (page + 1) * self.page)

    def reusable(self, hit: Hit, length: int) -> int:
        for page in range(length // self.page):
            if self.keeps(page) and not hit((page + 1) * self.page):
                length = page * self.page  # a longer prefix needs this page
                break
        return super().reusable(hit, length)


def policy_of(page_tokens: int, sight: Sight) -> GroupPolicy:
    if isinstance(sight, Mask):
        return Sparse(page_tokens, sight)
    return Full(page_tokens) if sight is None else Window(page_tokens, sight)


class Snapshots:
    """Recurrent state: reusable only where a snapshot was taken."""

    def __init__(self, block_tokens: int, every: int) -> None:
        self.block = block_tokens
        self.stride = block_tokens * every

    def first_live(self, position: int) -> int:
        return 0

    def reusable(self, hit: Hit, length: int) -> int:
        border = length // self.block * self.block
        while border and not hit(border):
            border -= self.block
        return border

    def wanted(self, position: int, prompt_len: int, keeps: Sequence[Keep] = ()) -> bool:
        """Whether the state after `position` tokens is kept: at the prompt's last border, at every stride, and where a
        prefix that shall be pinned has its last border."""
        if position > 0 and (position % self.stride == 0 or position == self.last_border(prompt_len)):
            return True
        return position > 0 and any(position == tokens // self.block * self.block for tokens, _ in keeps)

    def last_border(self, prompt_len: int) -> int:
        # The last prompt token always runs again, so the same prompt could never use a border after it.
        return (prompt_len - 1) // self.block * self.block

    def cut(self, start: int, count: int, prompt_len: int, keeps: Sequence[Keep] = ()) -> int:
        """The length of the chunk, shortened to end on the next border with a snapshot."""
        end = start + count
        border = (start // self.stride + 1) * self.stride
        for last in (self.last_border(prompt_len), *(tokens // self.block * self.block for tokens, _ in keeps)):
            if start < last < border:
                border = last
        return min(end, border) - start
