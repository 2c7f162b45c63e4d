"""An engine's end of the exchange between engines that compute prompts and engines that decode: it answers what the
front asks. All but the reports of copies runs on the loop's thread.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from bankfull.errors import ConfigError
from bankfull.handshake.inherited import inherited
from bankfull.handshake.link_tls import LinkTls
from bankfull.serve.engine.wire import Arrived, ExchangeEnds, Expect, FromEngine, RoomGranted, Ship, Shipped
from bankfull.state.lower_tier import disk_key, key_from_disk

if TYPE_CHECKING:
    from bankfull.llm import LLM
    from bankfull.state.exchange import Carrier, ExchangeReader, ExchangeShape
    from bankfull.state.page_listener import PageListener
    from bankfull.state.socket_carrier import SocketCarrier
    from bankfull.state.spec import Layout
    from bankfull.types import StepPlan

LONGEST_FACT = 80


class ExchangeEnd:
    def __init__(self, llm: LLM, ends: ExchangeEnds, say: Callable[[FromEngine], None], host: str) -> None:
        """`llm`: loaded for `choices.SEPARATE`. `host`: the address of this machine at which other engines reach this
        one, without shared memory."""
        from bankfull.runtime.tiering import add_expected, add_shipping
        from bankfull.state.exchange import address_of

        engine = llm.loaded.engine
        state = engine.scheduler.state
        self._say, self._address_of = say, address_of
        self._expectations = self._shipping = None
        self._requests: dict[Any, int] = {}
        """Requests that wait for a row, and their expectations."""
        self._ends, self._host = ends, host
        self._secret = ends.secret or inherited().exchange
        self._tls = LinkTls.of(ends.tls)
        self._sockets: SocketCarrier | None = None
        self.address: tuple[str, int] | None = None
        """Where this engine takes pages, without shared memory."""
        if ends.own is None:
            self._shipping = add_shipping(state, engine.runner, self._open_carrier, ends.lanes)
            self._shipping.on_stored = self._report
        else:
            self._expectations = add_expected(state, engine.runner, self._open_exchange, ends.nbytes)
            engine.on_launch.append(self._entered)

    def _open_carrier(self, identity: bytes) -> Carrier:
        from bankfull.state.exchange import MemoryCarrier
        from bankfull.state.socket_carrier import SocketCarrier

        if self._ends.files:
            return MemoryCarrier(self._ends.files, identity)
        self._sockets = SocketCarrier(self._secret, identity, self._tls)
        return self._sockets

    def _open_exchange(self, shape: ExchangeShape) -> ExchangeReader | PageListener:
        from bankfull.state.exchange import ExchangeReader
        from bankfull.state.page_listener import PageListener

        assert self._ends.own is not None
        if self._ends.files:
            return ExchangeReader(self._ends.files[self._ends.own], shape)
        try:
            listener = PageListener(shape, self._host, self._secret, self._tls)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"The engine cannot listen for pages at {self._host}: {why}.") from error
        self.address = listener.address
        return listener

    # -- where prompts are computed

    def ship(self, wanted: Ship) -> None:
        if self._shipping is not None:
            if self._sockets is not None and wanted.at is not None:
                self._sockets.locate(wanted.exchange, wanted.at)
            places = ((key_from_disk(name), self._address_of(wanted.exchange, at)) for name, at in wanted.places)
            self._shipping.add(wanted.id, places)

    def _report(self) -> None:
        """Tell what was copied; on the thread that has copied it."""
        assert self._shipping is not None
        answers: dict[int, Shipped] = {}
        for order, key, nbytes in self._shipping.take():
            answer = answers.setdefault(order, Shipped(order, [], 0))
            (answer.names if nbytes else answer.failed).append(disk_key(key))
            answer.nbytes += nbytes
        for answer in answers.values():
            self._say(answer)

    # -- where tokens are decoded

    def expect(self, wanted: Expect) -> None:
        if self._expectations is not None:
            self._expectations.expect(wanted.id, wanted.prompt, wanted.salt.encode(), wanted.tenant)
            self._grant(wanted.id)

    def arrived(self, news: Arrived) -> None:
        if self._expectations is not None:
            self._expectations.arrived(news.id, map(key_from_disk, news.names))

    def queued(self, request: int, expected: int) -> None:
        """A request waits for a row that uses what was expected."""
        if expected:
            self._requests[request] = expected
            if self._expectations is not None and self._expectations.ended(expected):
                self._grant()

    def gone(self, request: int) -> None:
        """A request has ended before it got a row."""
        if (expected := self._requests.pop(request, None)) is not None:
            self.drop(expected)

    def drop(self, number: int) -> None:
        """Nobody waits any longer for this expectation, or for this order."""
        if self._shipping is not None:
            self._shipping.drop(number)
        if self._expectations is not None and self._expectations.release(number):
            self._grant()

    def _entered(self, plan: StepPlan) -> None:
        for enter in plan.enter:
            self.gone(enter.request)  # type: ignore[arg-type]  # requests of this process have numbers

    def _grant(self, number: int | None = None) -> None:
        assert self._expectations is not None
        for grant in self._expectations.grants(number):
            places = [(disk_key(key), at) for key, at in grant.places]
            self._say(RoomGranted(grant.number, places, grant.waiting, list(map(disk_key, grant.withdrawn))))


def own_host(connection: socket.socket) -> str:
    """The address at which the API has reached this process; other engines reach it there, too."""
    if inherited().host:
        return inherited().host
    local = connection.family not in (socket.AF_INET, socket.AF_INET6)
    return "127.0.0.1" if local else str(connection.getsockname()[0])


def told_facts(facts: dict[str, Any], layout: Layout) -> dict[str, str]:
    """What the state depends on, as short texts that another engine's can be compared with. What a person has chosen
    stands before the layout, which follows from it."""
    pages = dict.fromkeys(str(group.page_tokens) for group in layout.paged)
    tensors = [tensor for group in layout.paged for tensor in group.tensors]
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    shapes = dict.fromkeys(f"{tensor.name} {'x'.join(map(str, tensor.shape))}" for tensor in tensors)
    chosen = {"pages in tokens of": pages, "KV dtype": dtypes, "tokens of": shapes}
    told = {**facts, **{name: " and ".join(values) for name, values in chosen.items()}}
    return {name: _short(value) for name, value in sorted(told.items(), key=lambda one: one[0] == "layout")}


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= LONGEST_FACT else sha256(text.encode()).hexdigest()[:16]
