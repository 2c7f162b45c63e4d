"""What each replica's prefix cache holds, as its engine reports it, and how much of a prompt that is.

The front knows keys only: the first 8 bytes of chained SHA-256 hashes, salted as in the engine (see `state.prefix`). A
key reveals no tokens, and the key of one salt cannot be computed or compared under another one, so the digest of a
replica tells one API key nothing about another one's prompts. A wrong digest costs milliseconds, never correctness: the
engine compares whole hashes itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from bankfull.fleet.reports import Facts, PrefixChanges
from bankfull.state.journal import KEY_BYTES, SLOT, place_tag, short_key
from bankfull.state.policy import Full, GroupPolicy, Hit, Snapshots, Window, longest_reusable
from bankfull.state.prefix import Chain

MOST_KEYS = 1 << 18
"""Keys kept per replica (about 18 MB). A full set takes no more until the replica evicts some: a chain then loses its
end, which costs a little precision, and never its start, which would hide the whole chain."""
MOST_BLOCKS = 4096
"""Blocks of a prompt that are hashed at most, because the event loop waits for it. The rest of a longer prompt counts
as not cached at every replica alike."""
FIRST_BLOCKS = 8
"""Blocks that are hashed first; then twice as many each time, while a replica still holds all of them."""


class PromptKeys:
    """The keys of one prompt's blocks, hashed once per request and only as far as a replica holds them."""

    def __init__(self, prompt: Sequence[int], salt: str, block_tokens: int, *, reuse: bool = True) -> None:
        """`reuse`: whether the engine may reuse cached prefixes for this request (not with prompt logprobs, nor for the
        mean of all hidden states)."""
        self.block_tokens = block_tokens
        # The last token always runs, so that its logits exist.
        self.blocks = min((len(prompt) - 1) // block_tokens, MOST_BLOCKS) if reuse and prompt and block_tokens else 0
        """Blocks that a prefix cache could supply."""
        self._prompt = prompt
        self._chain = Chain(salt.encode(), block_tokens)
        self._keys: list[int] = []

    def upto(self, blocks: int) -> list[int]:
        """The keys of at least the first `blocks` blocks (as many as there are): keys[i] covers blocks 0 to i."""
        known = len(self._keys)
        if blocks > known:
            end = min(max(blocks, 2 * known, FIRST_BLOCKS), self.blocks)
            self._chain.extend(self._prompt, end * self.block_tokens)
            self._keys += [short_key(name) for name in self._chain.names[known + 1 :]]
        return self._keys


class HeldPrefixes:
    """The keys in one replica's prefix cache."""

    def __init__(self, facts: Facts) -> None:
        """`facts` describe which pages and snapshots a prefix needs."""
        self._block = facts.page_tokens
        groups = facts.groups or ([] if facts.snapshots else [(facts.page_tokens, 0)])
        rules: list[tuple[int, GroupPolicy]] = [
            (place_tag(g), Window(page, window) if window else Full(page)) for g, (page, window) in enumerate(groups)
        ]
        # Full attention goes first: it ends at the first missing block, and the others then hash no further.
        self._rules: list[tuple[int, GroupPolicy | Snapshots]] = sorted(
            rules, key=lambda rule: isinstance(rule[1], Window)
        )
        if facts.snapshots:
            self._rules.append((place_tag(SLOT), Snapshots(facts.snapshots, 1)))
        self._one_group = len(self._rules) == 1 and not facts.snapshots and groups[0] == (self._block, 0)
        self.keys: set[int] = set()

    def __len__(self) -> int:
        return len(self.keys)

    def apply(self, changes: PrefixChanges) -> None:
        if changes.reset:
            self.keys.clear()
        # Dropped keys go first: they make room.
        self.keys.difference_update(_unpacked(changes.dropped))
        added = _unpacked(changes.added)
        room = MOST_KEYS - len(self.keys)
        self.keys.update(added if len(added) <= room else [key for key in added if key not in self.keys][:room])

    def clear(self) -> None:
        """The replica has ended: its cache is gone."""
        self.keys.clear()

    def cached_tokens(self, prompt: PromptKeys) -> int:
        """Tokens of the prompt's longest reusable prefix, by the engine's own rules."""
        if not self.keys or prompt.block_tokens != self._block:
            return 0
        if self._one_group:
            return self._block * self._leading_blocks(prompt)
        rules = [(rule, self._hits(prompt, tag)) for tag, rule in self._rules]
        return longest_reusable(prompt.blocks * self._block, rules)

    def _leading_blocks(self, prompt: PromptKeys) -> int:
        """Blocks up to the first one that is missing. A binary search would be wrong: pages are evicted one by one, so
        a block may be missing before one that is held, and the engine reuses nothing after it."""
        at, span = 0, FIRST_BLOCKS
        while at < prompt.blocks:
            end = min(at + span, prompt.blocks)
            part = prompt.upto(end)[at:end]
            if not self.keys.issuperset(part):
                return at + next(i for i, key in enumerate(part) if key not in self.keys)
            at, span = end, 2 * span
        return at

    def _hits(self, prompt: PromptKeys, tag: int) -> Hit:
        def hit(end: int) -> bool:
            blocks = end // self._block
            return prompt.upto(blocks)[blocks - 1] ^ tag in self.keys

        return hit


def _unpacked(keys: bytes) -> array[int]:
    assert len(keys) % KEY_BYTES == 0, "keys have 8 bytes each"
    return array("Q", keys)
