"""Two engines in one process, one computes prompts and hands them to the other: the tokens are those of one engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.runtime.mover import PlaceStore
from bankfull.runtime.tiering import add_expected, add_shipping
from bankfull.state import shipping as shipping_module
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import (
    Carrier,
    ExchangeReader,
    ExchangeShape,
    MemoryCarrier,
    address_of,
    open_exchange,
)
from bankfull.state.expected import shipped_length
from bankfull.state.page_listener import PageListener
from bankfull.state.shipping import ShippedKey
from bankfull.state.socket_carrier import SocketCarrier
from bankfull.state.tiers import Tiers
from tests.kit import Bench, device_of
from tests.tiny import VOCAB, model_of

PROMPT = [(7 * i + i * i // 3) % VOCAB for i in range(37)]
PAGE = 4
NEW = 8
SECRET = bytes(range(32))
Ends = tuple[Callable[[ExchangeShape], PlaceStore], Callable[[bytes], Carrier]]


def bench(shape: str, depth: int = 0, **sched: int) -> Bench:
    model = model_of(shape, torch.float32)
    state = StateConfig(page_tokens=PAGE)
    return Bench(model, device_of(depth, seed=1), depth, SchedConfig(**{"step_tokens": 12, "rows": 4, **sched}), state)


def alone(shape: str, prompt: list[int] = PROMPT) -> list[int]:
    one = bench(shape)
    one.add("alone", prompt, NEW)
    one.run()
    return one.tokens["alone", 0]


class Pair:
    """An engine that computes prompts, one that decodes, and a front that passes their messages on at once."""

    def __init__(self, shape: str, depth: int = 0, size: int = 1 << 20, link: str = "memory") -> None:
        self.prefill, self.decode = bench(shape, depth), bench(shape, depth)
        opened = {"memory": self._in_memory, "socket": self._over_sockets}[link]
        open_store, open_carrier = opened()
        self.expected = add_expected(self.decode.manager, self.decode.runner, open_store, size)
        self.shipping = add_shipping(self.prefill.manager, self.prefill.runner, open_carrier)
        self.shipped: list[ShippedKey] = []

    def _in_memory(self) -> Ends:
        mine = open_exchange()
        theirs = os.dup(mine)
        return partial(ExchangeReader, mine), partial(MemoryCarrier, [theirs])

    def _over_sockets(self) -> Ends:
        listeners: list[PageListener] = []

        def listen(shape: ExchangeShape) -> PageListener:
            listeners.append(PageListener(shape, "127.0.0.1", SECRET))
            return listeners[0]

        def connect(identity: bytes) -> SocketCarrier:
            made = SocketCarrier(SECRET, identity)
            made.locate(0, listeners[0].address)
            return made

        return listen, connect

    @property
    def tiers(self) -> Tiers:
        assert self.decode.manager.tiers is not None
        return self.decode.manager.tiers

    def expect(self, number: int, prompt: list[int]) -> None:
        self.expected.expect(number, prompt, b"")
        self.grant(number)

    def grant(self, number: int | None = None) -> None:
        for grant in self.expected.grants(number):
            self.shipping.add(grant.number, [(key, address_of(0, place)) for key, place in grant.places])

    def pass_on(self) -> None:
        for one in self.shipping.take():
            self.shipped.append(one)
            if one.nbytes:
                self.expected.arrived(one.order, [one.key])

    def compute(self, number: int, prompt: list[int]) -> int:
        """The first token, from the engine that computes prompts, when all has been shipped."""
        self.prefill.add(number, prompt, 1)
        while self.prefill.engine.busy:
            self.prefill.step()
            self.pass_on()
        self.prefill.settled()
        return self.prefill.tokens[number, 0][0]

    def go_on(self, number: int, prompt: list[int], first: int) -> list[int]:
        """All tokens, the others from the engine that decodes."""
        self.decode.add(number, prompt, NEW, generated=((first,),))
        self.decode.run()
        self.expected.release(number)
        return [first, *self.decode.tokens[number, 0]]

    def answer(self, number: int, prompt: list[int] = PROMPT) -> list[int]:
        self.expect(number, prompt)
        return self.go_on(number, prompt, self.compute(number, prompt))

    def copied(self) -> None:
        """Wait for the copies that have started, so that the next step learns of their end."""
        mover, ends = self.prefill.runner.mover, time.monotonic() + 30
        assert mover is not None
        while len(mover._ended) < sum(mover._queued.values()):
            assert time.monotonic() < ends, "a copy never ends"
            time.sleep(0.001)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.shipped)

    def free(self) -> None:
        """Nothing is held at either end."""
        self.prefill.settled()
        self.decode.settled()
        assert not len(self.expected) and not len(self.shipping)
        for tier in self.tiers.lower:
            assert tier.pages.census().held == tier.slots.census().held == 0

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextmanager
def paired(shape: str, depth: int = 0, size: int = 1 << 20, link: str = "memory") -> Iterator[Pair]:
    made = Pair(shape, depth, size, link)
    try:
        yield made
    finally:
        made.close()


LINKS = ("memory", "socket")
SHAPES = ("llama", "gemma", "latent", "mamba", "mamba2", "hybrid", "delta", "shared", "sparse")


@pytest.mark.covering(1)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_those_of_one_engine(shape: str, depth: int, link: str) -> None:
    with paired(shape, depth, link=link) as pair:
        assert pair.answer(1) == alone(shape)
        length = shipped_length(pair.decode.manager, len(PROMPT))
        assert length == len(PROMPT) // pair.decode.manager.border_tokens * pair.decode.manager.border_tokens >= 32
        # Only the tokens after the last whole page were computed, and none that was shipped.
        assert pair.decode.engine.totals.tokens == len(PROMPT) + NEW - 1 - length
        pair.free()


@pytest.mark.parametrize("shape", ["llama", "hybrid"])
def test_a_prefix_that_the_decoding_engine_holds_is_not_shipped(shape: str) -> None:
    longer = [*PROMPT, *range(30, 43)]
    with paired(shape) as pair:
        pair.answer(1)
        first, before = len(pair.shipped), pair.nbytes
        assert first
        pair.shipped.clear()
        assert pair.answer(2, longer) == alone(shape, longer)
        layout = pair.decode.manager.layout
        pages = [one for one in pair.shipped if one.key[0] != "slot"]
        rest = (shipped_length(pair.decode.manager, len(longer)) - 36) // PAGE
        assert len(pages) == rest * len(layout.paged), "only the rest is shipped"
        slot = layout.recurrent.slot_bytes if layout.recurrent else 0
        assert pair.nbytes == len(pages) * layout.frame_bytes + slot < before
        pair.shipped.clear()
        assert pair.answer(3, longer) == alone(shape, longer)
        assert not pair.shipped, "it holds all of it"
        pair.free()


def test_pages_are_shipped_while_the_rest_of_the_prompt_is_computed() -> None:
    with paired("llama") as pair:
        pair.expect(1, PROMPT)
        pair.prefill.add(1, PROMPT, 1)
        arrived = []
        while not pair.prefill.tokens[1, 0]:
            arrived.append(len(pair.shipped))
            pair.prefill.step()
            pair.copied()
            pair.pass_on()
        # Twelve tokens a step: three pages are complete after each, and a step later they are there.
        assert arrived == [0, 0, 3, 6]
        while pair.prefill.engine.busy:
            pair.prefill.step()
            pair.pass_on()
        assert len(pair.shipped) == 9
        pair.expected.release(1)
        pair.free()


def test_what_was_computed_before_is_shipped_at_once() -> None:
    with paired("llama") as pair:
        pair.prefill.add("before", PROMPT, 2)
        pair.prefill.run()
        pair.expect(1, PROMPT)
        while pair.prefill.engine.busy:
            pair.prefill.step()
            pair.pass_on()
        assert len(pair.shipped) == 9
        pair.expected.release(1)
        pair.free()


def test_a_damaged_page_is_computed_again() -> None:
    with paired("llama") as pair:
        pair.expect(1, PROMPT)
        first = pair.compute(1, PROMPT)
        [tier] = pair.tiers.lower
        place = tier.find(pair.shipped[4].key)
        assert place is not None
        store = pair.decode.runner.mover.stores[tier.tier]  # type: ignore[union-attr]
        store.files["pages"].write(place, b"\0another", memoryview(bytes(pair.decode.manager.layout.frame_bytes)))
        assert pair.go_on(1, PROMPT, first) == alone("llama")
        assert tier.traffic.failed == 1
        pair.free()


def test_an_exchange_that_is_too_small_takes_what_fits() -> None:
    frame = bench("llama").manager.layout.frame_bytes
    with paired("llama", size=3 * frame) as pair:
        assert pair.answer(1) == alone("llama")
        assert len(pair.shipped) == 3
        pair.free()


def test_a_model_with_snapshots_gets_all_or_nothing() -> None:
    layout = bench("hybrid").manager.layout
    with paired("hybrid", size=9 * layout.frame_bytes) as pair:
        assert pair.answer(1) == alone("hybrid")
        assert not pair.shipped, "a part of the pages would be of no use"
        pair.free()


def test_who_finds_no_room_waits_for_those_before() -> None:
    frame = bench("llama").manager.layout.frame_bytes
    other = PROMPT[::-1]
    with paired("llama", size=10 * frame) as pair:
        pair.expect(1, PROMPT)
        pair.expect(2, other)
        first = pair.compute(1, PROMPT)
        second = pair.compute(2, other)
        assert len([one for one in pair.shipped if one.order == 2]) == 1, "there is room for one page more"
        assert pair.go_on(1, PROMPT, first) == alone("llama")
        pair.grant()
        while pair.prefill.engine.busy:
            pair.prefill.step()
            pair.pass_on()
        assert len([one for one in pair.shipped if one.order == 2]) == 9
        assert pair.go_on(2, other, second) == alone("llama", other)
        pair.free()


@pytest.mark.covering(1)
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_leaves_nothing_at_either_end(steps: int, link: str) -> None:
    with paired("hybrid", depth=1, link=link) as pair:
        pair.expect(1, PROMPT)
        pair.prefill.add(1, PROMPT, 1)
        for _ in range(steps):
            pair.prefill.step()
            pair.pass_on()
        pair.prefill.take(pair.prefill.engine.abort(1))
        pair.shipping.drop(1)
        pair.expected.release(1)
        while pair.prefill.engine.busy:
            pair.prefill.step()
            pair.pass_on()
        pair.free()
        assert pair.answer(2) == alone("hybrid")
        pair.free()


class HalfDeaf:
    """Carries to exchange 1; exchange 0 belongs to an engine that takes nothing until `gate` opens, and then ends."""

    def __init__(self, carrier: Carrier, gate: threading.Event) -> None:
        self._carrier, self._gate = carrier, gate

    def carry(self, exchange: int, kind: str, place: int, key: bytes, content: memoryview) -> None:
        if exchange == 0:
            assert self._gate.wait(60)
            raise DamagedPlace("It has ended.")
        self._carrier.carry(0, kind, place, key, content)

    def close(self) -> None:
        self._carrier.close()


def test_an_engine_that_takes_nothing_delays_neither_steps_nor_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = bench("llama"), bench("llama")
    frame = decode.manager.layout.frame_bytes
    monkeypatch.setattr(shipping_module, "IN_FLIGHT_BYTES", 2 * frame)
    mine, gate = open_exchange(), threading.Event()
    theirs = os.dup(mine)
    expected = add_expected(decode.manager, decode.runner, partial(ExchangeReader, mine), 1 << 20)
    shipping = add_shipping(
        prefill.manager, prefill.runner, lambda identity: HalfDeaf(MemoryCarrier([theirs], identity), gate), 2
    )
    expected.expect(1, PROMPT, b"")
    [grant] = expected.grants(1)
    for order, exchange in ((7, 0), (1, 1)):
        shipping.add(order, [(key, address_of(exchange, place)) for key, place in grant.places])
    prefill.add(1, PROMPT, NEW)
    ended: list[ShippedKey] = []
    ends = time.monotonic() + 60
    while len(prefill.tokens[1, 0]) < NEW or len(ended) < 9:
        assert time.monotonic() < ends, "a step or a copy waits"
        prefill.step()
        ended += shipping.take()
    assert prefill.tokens[1, 0] == alone("llama")
    assert [one.order for one in ended] == [1] * 9 and all(one.nbytes for one in ended)
    gate.set()
    while prefill.engine.busy:
        prefill.step()
        ended += shipping.take()
    assert [(one.order, one.nbytes) for one in ended[9:]] == [(7, 0)] * 9, "each is told to have failed"
    prefill.settled()
    prefill.close()
    decode.close()


@pytest.mark.parametrize("link", LINKS)
def test_an_engine_with_state_of_another_form_writes_nothing(link: str) -> None:
    with paired("llama", link=link) as pair:
        writer = pair.prefill.runner.mover.stores  # type: ignore[union-attr]
        [store] = writer.values()
        carrier = store._carrier  # type: ignore[attr-defined]
        carrier._identity = bytes(32)
        for receiver in getattr(carrier, "_receivers", {}).values():
            receiver._identity = bytes(32)
        assert pair.answer(1) == alone("llama")
        assert pair.shipped and not pair.nbytes, "every copy was refused"
        pair.free()
