"""The state of each sequence as ids: pages and slots of two pools, found by content, shared by reference.

Every change is prepared without side effects and then applied, all or nothing over the groups. The scheduler numbers
the steps: `launched` is the newest step that a device may be running, and a released place stays quarantined until
that step has settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import repeat
from sys import maxsize

from bankfull.config import StateConfig
from bankfull.errors import ConfigError
from bankfull.state.journal import PRIVATE, SLOT, KeyJournal
from bankfull.state.lower_tier import Key
from bankfull.state.moves import Moves
from bankfull.state.pages import Census, Pool
from bankfull.state.pins import Pins
from bankfull.state.policy import GroupPolicy, Hit, Reusable, Snapshots, longest_reusable, policy_of
from bankfull.state.prefix import Chain
from bankfull.state.sequence_state import NOTHING, Match, Parked, Reserved, SequenceState
from bankfull.state.spec import Layout
from bankfull.state.state_facts import StateFacts
from bankfull.state.tiers import Tiers
from bankfull.types import NULL, Keep, Tier, TierAddress


class StateManager:
    def __init__(self, layout: Layout, frames: int, slots: int, config: StateConfig) -> None:
        if layout.recurrent and slots < 2:
            raise ConfigError(
                f"A recurrent model needs at least 2 slots, one to read and one to write, but the pool has {slots}."
            )
        self.layout = layout
        self.pages = Pool(frames)
        self.slots = Pool(slots if layout.recurrent else 0)
        self.prefix_cache = config.prefix_cache
        self.launched = -1
        # A snapshot is reusable only where the pages of every group end.
        block = layout.block_tokens
        self.border_tokens = max((g.page_tokens for g in layout.paged), default=block)
        """The pages of every group end at multiples of it."""
        self.snapshots = Snapshots(self.border_tokens, config.snapshot_every) if layout.recurrent else None
        self.windowed = any(g.window is not None for g in layout.paged)
        self.policies: list[GroupPolicy] = [policy_of(g.page_tokens, g.window) for g in layout.paged]
        self._one_group = (
            not self.windowed and not layout.recurrent and [block] == [g.page_tokens for g in layout.paged]
        )
        self.moves = Moves()
        self.tiers: Tiers | None = None
        """Set where there is a tier below the device."""
        self.facts = StateFacts({})
        self.generation = 0
        """How often the model's weights were written since it was loaded."""
        self._salt = b""
        self.without: dict[str, str] = {}
        """Optional parts that were asked for and could not be made, and why, in a few words."""
        self._parkings = 0
        self.pins = Pins(self, config.pin_share)

    # -- keys

    def chain(self, salt: bytes) -> Chain:
        """The keys of a sequence that is computed with the present weights."""
        return Chain(self._salt + salt, self.layout.block_tokens)

    def begin_generation(self, weights: str) -> None:
        """The model has other weights from now on; `weights`: their identity. Nothing that was computed before will be
        found. What the disk tier holds stays there for a process that loads the weights of before."""
        self.generation += 1
        self._salt = sha256(f"weights {self.generation} {weights}".encode()).digest()
        self.facts = self.facts.beside(weights=weights, generation=self.generation)
        self.forget()
        if self.tiers is not None:
            self.tiers.begin_generation()

    # -- queries, without side effects

    def frames_for(self, length: int, new: int) -> int:
        return self.layout.frames_for(length, new)

    def lack(self, match: Match, length: int, new: int, headroom: int) -> tuple[int, int]:
        """Pages and slots that are missing for a sequence of `length` tokens that starts from `match`; (0, 0) when it
        could run."""
        missing = idle = 0
        for g, group in enumerate(self.layout.paged):
            table = match.tables[g] if match.tables else ()
            missing += max(0, group.frames_for(length, new) - len(table) + table.count(NULL))
            idle += self.pages.idle(table)
        slots = 1 + self.slots.is_cached(match.slot) if self.snapshots is not None else 0
        if not self.layout.paged:
            headroom = 0  # a model without pages never lacks any
        return max(0, missing + headroom + idle - self.pages.available), max(0, slots - self.slots.available)

    def match(self, chain: Chain, tokens: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of at most `limit` tokens: the fixed point of every group's `reusable`."""
        if not self.prefix_cache or limit < self.layout.block_tokens:
            return Match(0)
        if self._one_group:
            pages = self._leading_pages(chain, tokens, limit // chain.block)
            return Match(len(pages) * chain.block, (tuple(pages),)) if pages else Match(0)
        rules: list[tuple[Reusable, Hit]] = [
            (policy, self._hits(chain, tokens, g)) for g, policy in enumerate(self.policies)
        ]
        if self.snapshots is not None:
            rules.append((self.snapshots, lambda end: self._find_slot(chain, tokens, end) is not None))
        length = longest_reusable(limit, rules)
        if not length:
            return Match(0)
        tables = []
        for g, (group, policy) in enumerate(zip(self.layout.paged, self.policies, strict=True)):
            first, size = policy.first_live(length), group.page_tokens
            # The prefix was found just before, so all its blocks have names.
            table = [NULL] * (length // size)
            for page in range(len(table)):
                if page >= first or policy.keeps(page):
                    table[page] = self.pages.find((g, chain.names[(page + 1) * size // chain.block])) or NULL
            tables.append(tuple(table))
        slot = self._find_slot(chain, tokens, length) if self.snapshots is not None else None
        return Match(length, tuple(tables), slot or NULL)

    def _leading_pages(self, chain: Chain, tokens: Sequence[int], most: int) -> list[int]:
        """Pages of the first blocks up to the first one that is not cached: `match` for one group without a window."""
        pages: list[int] = []
        while len(pages) < most:
            chain.reach(tokens, (len(pages) + 1) * chain.block)
            names = chain.names[len(pages) + 1 : most + 1]
            leading = self.pages.find_first(zip(repeat(0), names))
            pages += leading
            if len(leading) < len(names):
                break
        return pages

    def cut(self, start: int, count: int, prompt_len: int, keeps: Sequence[Keep] = ()) -> int:
        """The part of a chunk to run so that it ends where a snapshot is wanted."""
        if self.snapshots is None or not self.prefix_cache:
            return count
        return self.snapshots.cut(start, count, prompt_len, keeps)

    def shortage(self, state: SequenceState, upto: int, slots: int) -> tuple[int, int]:
        """Pages and slots that `reserve` would lack; (0, 0) when it would succeed."""
        lacking = max(0, self.growth(state, upto) - self.pages.available)
        return lacking, 0 if self.snapshots is None else max(0, slots - self.slots.available)

    def growth(self, state: SequenceState, upto: int) -> int:
        """Pages for the first `upto` tokens that the sequence does not have yet."""
        if upto <= state.covered:
            return 0
        pages = 0
        for group, table in zip(self.layout.paged, state.tables, strict=True):
            pages += max(0, -(-upto // group.page_tokens) - len(table))
        return pages

    def held(self, state: SequenceState) -> int:
        """Pages that a sequence holds, alone or with others."""
        pages = 0
        for table, live in zip(state.tables, state.live, strict=True):
            pages += len(table) - (live and table[:live].count(NULL))
        return pages

    # -- the life of a sequence

    def open(self, chain: Chain, match: Match) -> SequenceState:
        """Start a sequence on the cached prefix `match`."""
        tables = [list(t) for t in match.tables] or [[] for _ in self.layout.paged]
        for table in tables:
            self.pages.share_all(table)
        if match.slot:
            self.slots.share(match.slot)
        if match.private:
            self.withdraw(match.private)
        live = [policy.first_live(match.length) for policy in self.policies]
        published = [match.length // group.page_tokens for group in self.layout.paged]
        return self._opened(chain, tables, live, published, match.length, match.slot)

    def reserve(self, state: SequenceState, upto: int, slots: int = 1, ahead: int = 0) -> Reserved | None:
        """Places for the first `upto` tokens and `slots` recurrent states to write: all of them, or None. With
        `ahead`, places for this many more tokens too, if there are enough for all of them."""
        if upto + ahead <= state.covered and self.snapshots is None:
            return NOTHING
        if ahead and self.shortage(state, upto + ahead, slots) == (0, 0):
            upto += ahead
        if self.growth(state, upto) > self.pages.available:
            return None
        written: tuple[int, ...] = ()
        if self.snapshots is not None:
            if slots > self.slots.available:
                return None
            written = tuple(self.slots.take(slots) or ())
            state.writing.append(written)
        return Reserved(self._extend(state, upto) if upto > state.covered else (), written)

    def _extend(self, state: SequenceState, upto: int) -> list[tuple[int, int, tuple[int, ...]]]:
        edits = []
        for g, (group, table) in enumerate(zip(self.layout.paged, state.tables, strict=True)):
            missing = -(-upto // group.page_tokens) - len(table)
            if missing > 0:
                taken = self.pages.take(missing)
                assert taken is not None, "growth() and take() disagree"
                edits.append((g, len(table), tuple(taken)))
                table += taken
        state.covered = self._covered(state.tables)
        return edits

    def forget_before(self, state: SequenceState, position: int) -> None:
        """Release the pages before the window of `position`: no earlier token will run again. A page that a launched
        step still fills is kept until it is published, for the next request with this prompt."""
        for g, (table, policy) in enumerate(zip(state.tables, self.policies, strict=True)):
            first = min(policy.first_live(position), state.published[g] if self.prefix_cache else len(table))
            for i in range(state.live[g], first):
                if not policy.keeps(i):
                    self.pages.drop(table[i], self.launched)
                    table[i] = NULL
            state.live[g] = max(state.live[g], first)

    def commit(self, state: SequenceState, step: int, accepted: int) -> None:
        """The oldest launched step has settled with `accepted` drafts. The slot after them becomes the state, and the
        others are released; `step` is the last step that may use them."""
        if self.snapshots is None:
            return
        written = state.writing.pop(0)
        self.slots.drop(state.slot, step)
        state.slot = written[accepted]
        for i, slot in enumerate(written):
            if i != accepted:
                self.slots.drop(slot, step)

    def publish(
        self,
        state: SequenceState,
        tokens: Sequence[int],
        computed: int,
        prompt_len: int,
        keeps: Sequence[Keep] = (),
    ) -> None:
        """Publish the full pages of settled steps to the prefix cache, and the recurrent state where it is wanted."""
        if computed < state.border or state.mixed:
            return
        state.border = self._next_border(computed)
        state.chain.extend(tokens, computed)
        for g, (group, table) in enumerate(zip(self.layout.paged, state.tables, strict=True)):
            full = computed // group.page_tokens
            begin, blocks = state.published[g], group.page_tokens // state.chain.block
            if begin < full:
                names = state.chain.names[(begin + 1) * blocks : full * blocks + 1 : blocks]
                self.pages.publish_all(table[begin:full], zip(repeat(g), names))
                state.published[g] = full
        if self.snapshots is not None and self.snapshots.wanted(computed, prompt_len, keeps):
            self.slots.publish(state.slot, (SLOT, state.chain.name(computed)))

    def fork(self, state: SequenceState, length: int) -> SequenceState | None:
        """A second sequence with the same first `length` tokens: full pages and the slot are shared, partial pages are
        copied by transfers. `state` must have settled exactly there. None when too few pages are available."""
        assert not state.writing, "a sequence is forked only when it has settled"
        copies = self.pages.take(sum(1 for group in self.layout.paged if length % group.page_tokens))
        if copies is None:
            return None
        tables = []
        for group, table in zip(self.layout.paged, state.tables, strict=True):
            full = length // group.page_tokens
            child = table[:full]
            self.pages.share_all(child)
            if length % group.page_tokens:
                copy = copies.pop()
                child.append(copy)
                self._copy_page(table[full], copy)
            tables.append(child)
        self.slots.share(state.slot)
        chain = Chain(b"", self.layout.block_tokens)
        # Later blocks of the parent may hold tokens that it has generated on another engine.
        chain.names = state.chain.names[: length // self.layout.block_tokens + 1]
        published = [length // group.page_tokens for group in self.layout.paged]
        forked = self._opened(chain, tables, list(state.live), published, length, state.slot)
        forked.mixed = state.mixed
        return forked

    def release(self, state: SequenceState) -> None:
        """Release everything, newest pages first, so that the cache evicts the ends of contexts before their starts."""
        for table in state.tables:
            self.pages.drop_all(reversed(table), self.launched)
            table.clear()
        for written in state.writing:
            self.slots.drop_all(written, self.launched)
        state.writing.clear()
        if state.slot:
            self.slots.drop(state.slot, self.launched)
            state.slot = NULL

    # -- parking, and content below the device

    def park(self, state: SequenceState, computed: int, copy: bool) -> Parked | None:
        """Release everything, but keep the state of the settled `computed` tokens in the cache. `copy`: and on the
        host, at once. None if there is no cache."""
        if not self.prefix_cache or not computed:
            self.release(state)
            return None
        self._parkings += 1
        name = PRIVATE + self._parkings.to_bytes(8, "big")
        private: list[Key] = []
        for g, (group, table) in enumerate(zip(self.layout.paged, state.tables, strict=True)):
            if computed % group.page_tokens and self.pages.publish(table[computed // group.page_tokens], (g, name)):
                private.append((g, name))
        slot: Key | None = None
        if self.snapshots is not None:
            if self.slots.publish(state.slot, (SLOT, name)):
                private.append((SLOT, name))
            # It may have a key already: a snapshot's, or that of a fork that is parked at the same token.
            slot = self.slots.key_of(state.slot)  # type: ignore[assignment]
        parked = Parked(computed, tuple(private), slot, self.launched)
        keys = self.keys_of(parked, state.chain) if copy else []
        self.release(state)
        if keys and self.tiers is not None:
            self.tiers.swap_out(keys)
        return parked

    def keys_of(self, parked: Parked, chain: Chain) -> list[Key]:
        """The keys of all that a parked sequence needs."""
        private = [key for key in parked.private if key != parked.slot]
        return [*self._keys_below(chain, parked.computed), *private, *([] if parked.slot is None else [parked.slot])]

    def match_parked(self, parked: Parked, chain: Chain) -> Match | None:
        """The whole state of a parked sequence; None if some of it was lost."""
        private = dict(parked.private)
        if self._one_group:
            names = chain.names[1 : parked.computed // chain.block + 1]
            if parked.computed % chain.block:
                names.append(private.get(0, b""))
            pages = self.pages.find_first(zip(repeat(0), names))
            whole = len(pages) * chain.block >= parked.computed
            return Match(parked.computed, (tuple(pages),), NULL, parked.private) if whole else None
        tables = []
        for g, (group, policy) in enumerate(zip(self.layout.paged, self.policies, strict=True)):
            first, size = policy.first_live(parked.computed), group.page_tokens
            table = [NULL] * -(-parked.computed // size)
            for page in range(len(table)):
                if page < first and not policy.keeps(page):
                    continue
                whole = (page + 1) * size <= parked.computed
                name = chain.names[(page + 1) * size // chain.block] if whole else private.get(g)
                place = None if name is None else self.pages.find((g, name))
                if place is None:
                    return None
                table[page] = place
            tables.append(tuple(table))
        slot = None
        if self.snapshots is not None:
            slot = None if parked.slot is None else self.slots.find(parked.slot)
            if slot is None:
                return None
        return Match(parked.computed, tuple(tables), slot or NULL, parked.private)

    def unpark(self, parked: Parked) -> None:
        """The sequence has ended, or starts from less than it had."""
        self.withdraw(parked.private)

    def withdraw(self, keys: Sequence[Key]) -> None:
        if self.tiers is not None:
            self.tiers.withdraw(keys)
        else:
            for key in keys:
                (self.slots if key[0] == SLOT else self.pages).withdraw(key)

    def reach(self, chain: Chain, tokens: Sequence[int], limit: int) -> int:
        """The longest prefix of at most `limit` tokens whose state is on the device or below it."""
        if self.tiers is None or not self.prefix_cache or limit < self.layout.block_tokens:
            return 0
        rules: list[tuple[Reusable, Hit]] = [
            (policy, self._hits_anywhere(chain, tokens, g)) for g, policy in enumerate(self.policies)
        ]
        if self.snapshots is not None:
            rules.append((self.snapshots, self._hits_anywhere(chain, tokens, SLOT)))
        return longest_reusable(limit, rules)

    def keys_for(self, chain: Chain, length: int) -> list[Key]:
        """The keys of all that a prefix of `length` tokens needs; the chain must have its names."""
        keys = self._keys_below(chain, length)
        if self.snapshots is not None:
            keys.append((SLOT, chain.names[length // chain.block]))
        return keys

    def _keys_below(self, chain: Chain, length: int) -> list[Key]:
        """The keys of the full pages that a sequence of `length` tokens still needs."""
        keys: list[Key] = []
        for g, (group, policy) in enumerate(zip(self.layout.paged, self.policies, strict=True)):
            first, size = policy.first_live(length), group.page_tokens
            for page in range(length // size):
                if page >= first or policy.keeps(page):
                    keys.append((g, chain.names[(page + 1) * size // chain.block]))
        return keys

    def _hits_anywhere(self, chain: Chain, tokens: Sequence[int], group: int | str) -> Hit:
        tiers = self.tiers
        assert tiers is not None

        def hit(end: int) -> bool:
            name = chain.reach(tokens, end)
            if name is None:
                return False
            key: Key = (group, name)
            return tiers.device_pool(key).find(key) is not None or tiers.find(key) is not None

        return hit

    # -- steps

    def launch(self, step: int) -> None:
        self.launched = step

    def settle(self, step: int, completed: Sequence[int] = (), failed: Sequence[int] = ()) -> None:
        """All steps up to `step` have finished. Transfers that have ended no longer pin their places."""
        self.pages.settle(step)
        self.slots.settle(step)
        if completed or failed:
            self.moves.settle(completed, failed)

    @property
    def moving(self) -> bool:
        """Whether content is on its way between tiers, or waits for it."""
        return bool(self.moves.under_way) or (self.tiers is not None and self.tiers.waits)

    def wake_at(self) -> float | None:
        """When content that waits for its way down may go; None if something is under way, or nothing waits."""
        return None if self.moves or self.tiers is None else self.tiers.wake_at()

    def census(self) -> tuple[Census, Census]:
        return self.pages.census(), self.slots.census()

    def check(self) -> None:
        """Assert the pools' invariant: each place is in exactly one condition."""
        for name, pool in (("page", self.pages), ("slot", self.slots)):
            census = pool.census()
            assert census.total == pool.size, f"the {name} pool of {pool.size} adds up to {census}"
        if self.tiers is not None:
            self.tiers.check()

    def forget(self, everywhere: bool = False) -> None:
        """Empty the prefix cache, on the device or on all tiers, and end all pins."""
        self.pins.clear()
        self.pages.forget()
        self.slots.forget()
        if self.tiers is not None and everywhere:
            self.tiers.forget()

    def journal(self) -> KeyJournal:
        """Follow the prefix cache from now on."""
        return KeyJournal((self.pages, self.slots))

    def _copy_page(self, src: int, dst: int) -> None:
        """Pin both pages until the copy is done."""
        pages = self.pages
        pages.share_all((src, dst))

        def ended(succeeded: bool) -> None:
            pages.drop_all((src, dst), pages.settled)

        self.moves.start(TierAddress(Tier.DEVICE, src), TierAddress(Tier.DEVICE, dst), ended)

    def _opened(
        self, chain: Chain, tables: list[list[int]], live: list[int], published: list[int], length: int, slot: int
    ) -> SequenceState:
        border = self._next_border(length)
        return SequenceState(chain, tables, live, published, self._covered(tables), border, slot)

    def _covered(self, tables: list[list[int]]) -> int:
        sizes = zip(self.layout.paged, tables, strict=True)
        return min([len(table) * group.page_tokens for group, table in sizes], default=maxsize)

    def _next_border(self, length: int) -> int:
        block = self.layout.block_tokens
        return (length // block + 1) * block if self.prefix_cache else maxsize

    def _hits(self, chain: Chain, tokens: Sequence[int], group: int) -> Hit:
        return lambda end: self._find(chain, tokens, group, end) is not None

    def _find(self, chain: Chain, tokens: Sequence[int], group: int, end: int) -> int | None:
        name = chain.reach(tokens, end)
        return None if name is None else self.pages.find((group, name))

    def _find_slot(self, chain: Chain, tokens: Sequence[int], end: int) -> int | None:
        name = chain.reach(tokens, end)
        return None if name is None else self.slots.find((SLOT, name))
