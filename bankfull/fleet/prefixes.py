"""What each replica's prefix cache holds, as its engine reports it, and how much of a prompt that is.

The front knows keys only: the first 8 bytes of chained SHA-256 hashes, salted as in the engine (see `state.prefix`). A
key reveals no tokens, and the key of one salt cannot be computed or compared under another one, so the digest of a
replica tells one API key nothing about another one's prompts. A wrong digest costs milliseconds, never correctness: the
engine compares whole hashes itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from bankfull.fleet.reports import Facts, PrefixChanges
from bankfull.state.journal import KEY_BYTES, SLOT, place_tag
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

    def __init__(
        self,
        prompt: Sequence[int],
        salt: str,
        block_tokens: int,
        *,
        reuse: bool = True,
        chain: Chain | None = None,
    ) -> None:
        """`reuse`: whether the engine may reuse cached prefixes for this request (not with prompt logprobs, nor for the
        mean of all hidden states). `chain`: hashes of this prompt's first blocks, where they are known already."""
        self.block_tokens = block_tokens
        # The last token always runs, so that its logits exist.
        self.blocks = min((len(prompt) - 1) // block_tokens, MOST_BLOCKS) if reuse and prompt and block_tokens else 0
        """Blocks that a prefix cache could supply."""
        self._prompt = prompt
        self._chain = chain or Chain(salt.encode(), block_tokens)
        self._keys: list[int] = []

    def upto(self, blocks: int) -> list[int]:
        """The keys of at least the first `blocks` blocks (as many as there are): keys[i] covers blocks 0 to i."""
        known = len(self._keys)
        if blocks > known:
            names = self._chain.names
            # Names that are known already cost no hash.
            end = min(max(blocks, 2 * known, FIRST_BLOCKS, len(names) - 1), self.blocks)
            if end >= len(names):
                self._chain.extend(self._prompt, end * self.block_tokens)
            self._keys += _unpacked(b"".join([name[:KEY_BYTES] for name in names[known + 1 : end + 1]]))
        return self._keys


class CachedTokens:
    """Tokens of one prompt that each replica holds. `levels`: (tokens, replicas as a bit mask of their slots); no
    replica is in two levels, and those in none hold nothing."""

    __slots__ = ("levels",)

    def __init__(self, levels: Sequence[tuple[int, int]] = ()) -> None:
        self.levels = levels

    def at(self, slot: int) -> int:
        return next((tokens for tokens, mask in self.levels if mask >> slot & 1), 0)


class PrefixIndex:
    """Which replicas hold each key, as a bit mask of their slots: a prompt is looked up once for all replicas."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._held: dict[int, HeldPrefixes] = {}
        self._blocks: set[int] = set()
        """Block sizes of all replicas; 0 stands for a model with windows or recurrent state."""

    def enter(self, slot: int, facts: Facts) -> HeldPrefixes:
        """The replica in this slot has started, with an empty cache."""
        self.leave(slot)
        held = self._held[slot] = HeldPrefixes(facts, self, 1 << slot)
        self._blocks.add(held.block if held.one_group else 0)
        return held

    def leave(self, slot: int) -> None:
        """The replica in this slot has ended."""
        if (held := self._held.pop(slot, None)) is not None:
            held.clear()
            self._blocks = {other.block if other.one_group else 0 for other in self._held.values()}

    def apply(self, slot: int, changes: PrefixChanges) -> None:
        self._held[slot].apply(changes)

    def add(self, keys: Iterable[int], bit: int) -> None:
        masks = self._masks
        for key in keys:
            # A key that one replica holds shares the bit's own object, so that it needs no memory of its own.
            if (before := masks.setdefault(key, bit)) is not bit:
                masks[key] = before | bit

    def drop(self, keys: Iterable[int], bit: int) -> None:
        masks = self._masks
        for key in keys:
            if (before := masks.pop(key, bit)) is not bit and (left := before & ~bit):
                masks[key] = left

    def cached_tokens(self, prompt: PromptKeys) -> CachedTokens:
        """Tokens of the prompt's longest reusable prefix at each replica."""
        if not self._held or not prompt.blocks:
            return CachedTokens()
        if self._blocks == {prompt.block_tokens}:
            return CachedTokens(self._leading_tokens(prompt))
        cached = ((held.cached_tokens(prompt), 1 << slot) for slot, held in self._held.items())
        return CachedTokens([(tokens, bit) for tokens, bit in cached if tokens])

    def _leading_tokens(self, prompt: PromptKeys) -> list[tuple[int, int]]:
        """A replica's prefix ends with its first missing block."""
        levels: list[tuple[int, int]] = []
        masks = self._masks
        alive, holders, number = -1, -1, 0
        while number < prompt.blocks:
            for key in prompt.upto(number + 1)[number:]:
                mask = masks.get(key, 0)
                if mask is not holders:  # the blocks of one replica share an object
                    holders = mask
                    still = alive & mask
                    if still != alive:
                        if number:
                            levels.append((number * prompt.block_tokens, alive ^ still))
                        alive = still
                        if not alive:
                            return levels
                number += 1
        return [*levels, (prompt.blocks * prompt.block_tokens, alive)]


class HeldPrefixes:
    """The keys in one replica's prefix cache."""

    def __init__(self, facts: Facts, index: PrefixIndex | None = None, bit: int = 0) -> None:
        """`facts` describe which pages and snapshots a prefix needs. `index`: kept up to date, under this bit."""
        self._index, self._bit = index, bit
        self.block = facts.page_tokens
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
        self.one_group = len(self._rules) == 1 and not facts.snapshots and groups[0] == (self.block, 0)
        self.keys: set[int] = set()

    def __len__(self) -> int:
        return len(self.keys)

    def apply(self, changes: PrefixChanges) -> None:
        if changes.reset:
            self.clear()
        # Dropped keys go first: they make room.
        dropped, added = _unpacked(changes.dropped), _unpacked(changes.added)
        self.keys.difference_update(dropped)
        room = MOST_KEYS - len(self.keys)
        if len(added) > room:
            added = array("Q", [key for key in added if key not in self.keys][:room])
        self.keys.update(added)
        if self._index is not None:
            self._index.drop(dropped, self._bit)
            self._index.add(added, self._bit)

    def clear(self) -> None:
        """The replica has ended: its cache is gone."""
        if self._index is not None:
            self._index.drop(self.keys, self._bit)
        self.keys.clear()

    def cached_tokens(self, prompt: PromptKeys) -> int:
        """Tokens of the prompt's longest reusable prefix, by the engine's own rules."""
        if not self.keys or prompt.block_tokens != self.block:
            return 0
        if self.one_group:
            return self.block * self._leading_blocks(prompt)
        rules = [(rule, self._hits(prompt, tag)) for tag, rule in self._rules]
        return longest_reusable(prompt.blocks * self.block, rules)

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
            blocks = end // self.block
            return prompt.upto(blocks)[blocks - 1] ^ tag in self.keys

        return hit


def _unpacked(keys: bytes) -> array[int]:
    assert len(keys) % KEY_BYTES == 0, "keys have 8 bytes each"
    return array("Q", keys)
