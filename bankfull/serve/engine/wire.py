"""The protocol between the API process and the engine process: msgspec messages, each with a length prefix, over a
private socket, and the engine's end of that socket. Never pickle; a message longer than MAX_MESSAGE is not read.
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from bankfull.fleet.page_tables import PageTables as PageTables
from bankfull.fleet.reports import Facts as Facts
from bankfull.fleet.reports import Load as Load
from bankfull.fleet.reports import PrefixChanges as PrefixChanges
from bankfull.outputs import Delta, Logprob
from bankfull.sample.params import SamplingParams

MAX_MESSAGE = 64 << 20
"""Bytes a message may have."""
HEADER = 4
"""Bytes of the length prefix, little-endian."""


# -- to the engine


class ExchangeEnds(msgspec.Struct):
    """The exchanges of the engines that decode (`state.exchange`), one for each."""

    files: list[int]
    """Those in shared memory, which the engine inherits: their file descriptors, in the order of these engines. Empty:
    they are filled over sockets."""
    nbytes: int
    """Bytes of each."""
    own: int | None = None
    """The number of the one that this engine reads; None: it computes prompts, and writes to all."""
    engines: int = 0
    """How many there are, without shared memory."""
    secret: bytes = b""
    """What the two ends of a socket prove to each other."""

    @property
    def lanes(self) -> int:
        """Copies that must not wait for each other: memory always takes them, an engine at the end of a socket may
        not."""
        return 1 if self.files else self.engines


class Configure(msgspec.Struct, tag="configure"):
    """The first message: the model, and the options of `LLM`."""

    model: str
    options: dict[str, str | int | float | bool | None]
    threads: int | None = None
    """Threads that compute; None: one for each core."""
    tells_prefixes: bool = False
    """Whether the engine reports the keys of its prefix cache, its pace, and the requests that it begins, for routing
    between replicas."""
    exchange: ExchangeEnds | None = None
    """Set where engines that compute prompts hand them to engines that decode."""


class Submit(msgspec.Struct, tag="submit", omit_defaults=True):
    id: int
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    """Lower runs first; batch work has the highest number."""
    salt: str = ""
    pool: str | None = None
    """None, "last" or "mean": hidden states instead of tokens."""
    explain: bool = False
    """Whether `RequestDone` has an account of the time."""
    tenant: str = ""
    """The owner of the request: tenants share the engine evenly."""
    generated: list[list[int]] = []
    """Tokens that each sample has generated on another engine, by sample number; empty for a new request. The engine
    continues after them, and its deltas begin with the first new token."""
    finished: list[int] = []
    """Numbers of the samples that have ended on another engine: they are not continued and get no delta."""
    keeps: list[tuple[int, float]] = []
    """Prefixes of the prompt to pin in the prefix cache, the shortest first: tokens, and seconds since the last use."""
    hands_over: bool = False
    """The request leaves the engine as soon as each of its samples has a token; another engine continues it."""
    expected: int = 0
    """The number of the `Expect` whose state it uses; its places are released when the request gets a row."""


class Later(msgspec.Struct, tag="later"):
    """A `Submit` that takes long to prepare, still packed, so that the engine's loop need not decode it. The other
    fields decide when it is prepared."""

    id: int
    tenant: str
    batch: bool
    size: int
    """Cost of the preparation, in characters or tokens."""
    submit: bytes


class Abort(msgspec.Struct, tag="abort"):
    ids: list[int]


class Expect(msgspec.Struct, tag="expect"):
    """Another engine computes this prompt, and hands its state over: answered by `RoomGranted`, once or several times.
    An `Abort` of its number, or the request that names it, ends it."""

    id: int
    prompt: list[int]
    salt: str


class Ship(msgspec.Struct, tag="ship"):
    """Copy this content to another engine's exchange as soon as it is on the device; answered by `Shipped`. Several of
    one number add up; an `Abort` of the number ends it."""

    id: int
    exchange: int
    """The number of the exchange (`ExchangeEnds`)."""
    places: list[tuple[bytes, int]]
    """Names of content (`state.tiers.disk_key`), in the order of the tokens, and their places."""
    at: tuple[str, int] | None = None
    """Where the other engine listens; None: the exchange is in shared memory."""


class Arrived(msgspec.Struct, tag="arrived"):
    """The content of these names is in the places that `RoomGranted` has named."""

    id: int
    names: list[bytes]


class ResetCache(msgspec.Struct, tag="reset"):
    """Drop all unused prefixes from the cache; answered by `Forgotten`."""

    id: int


class ShowPages(msgspec.Struct, tag="pages"):
    """Show the page tables of running sequences; answered by `PagesShown`."""

    id: int


ToEngine = Configure | Submit | Later | Abort | ResetCache | ShowPages | Expect | Ship | Arrived

LIGHT_PROMPT, LIGHT_TEXT, LIGHT_IDS = 4096, 256, 4096
"""Tokens of a prompt, characters of stop strings and bad words, and allowed ids up to which a request is prepared
between two steps; a larger one, and every grammar, is prepared by a thread."""
REPLAY_COST = 4
"""Estimated cost of preparing one token that was generated on another engine, in prompt tokens: it is detokenized and
searched for stop strings."""


def preparation(submit: Submit) -> int:
    """Cost of preparing this request, in characters and tokens; 0: cheap enough for the engine's loop."""
    params = submit.params
    texts = sum(map(len, params.stop)) + sum(map(len, params.bad_words))
    ids = len(params.allowed_token_ids or ()) + len(params.banned_token_ids)
    structured = 0 if params.structured is None else 1 + len(params.structured.source)
    tokens = len(submit.prompt)
    if submit.generated:
        tokens += REPLAY_COST * sum(map(len, submit.generated))
    light = tokens <= LIGHT_PROMPT and texts <= LIGHT_TEXT and ids <= LIGHT_IDS
    return 0 if light and not structured and not submit.explain else tokens + texts + ids + structured


# -- from the engine


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded and warmed up."""

    facts: Facts


class LoadingPhase(msgspec.Struct, tag="phase"):
    """How far loading is, as one line for the log."""

    text: str


class Failed(msgspec.Struct, tag="failed"):
    """The model cannot be loaded; the process exits."""

    message: str


class RequestDone(msgspec.Struct, array_like=True):
    """All samples of a request have ended."""

    id: int
    queue: float | None
    ttft: float | None
    seconds: float
    cached_tokens: int
    output_tokens: int
    prompt_logprobs: bytes | list[dict[int, Logprob] | None] | None = None
    """Packed as in `prompt_lines`, or for each token: token id -> (log-probability, text); the prompt's own first."""
    embedding: list[float] | None = None
    account: dict[str, Any] | None = None
    """Account of the request's time, if the call has `explain`."""
    kept: list[int] = []
    """Tokens that each of `Submit.keeps` has newly pinned."""
    handed: bool = False
    """The samples have not ended: the request left this engine as `Submit.hands_over` asks."""


class StepMessage(msgspec.Struct, tag="step", omit_defaults=True):
    """The results of one engine step for all requests, written at once."""

    deltas: list[Delta]
    done: list[RequestDone]
    load: Load
    prefixes: PrefixChanges | None = None
    """Sent only if `Configure.tells_prefixes` is set, at most every 50 ms and when the engine becomes idle."""


class Begun(msgspec.Struct, tag="begun", omit_defaults=True):
    """The engine begins to work on these requests: to compile a grammar, or to compute a prompt. Sent before the work,
    if `Configure.tells_prefixes` is set: the last such message of an engine that dies names the requests that may have
    ended it."""

    ids: list[int]
    waits: bool = False
    """The preparation is complete, and the request waits in the queue."""


class Refused(msgspec.Struct, tag="refused"):
    """A request that never ran. `kind`: "request" (its own fault), "busy" (no room), "internal"."""

    id: int
    kind: str
    message: str


class Forgotten(msgspec.Struct, tag="forgotten"):
    id: int
    pages: int


class PagesShown(msgspec.Struct, tag="shown"):
    id: int
    tables: PageTables


class RoomGranted(msgspec.Struct, tag="room"):
    """Places of the engine's exchange for the content that an `Expect` needs and the engine does not hold."""

    id: int
    places: list[tuple[bytes, int]]
    waiting: int
    """Names that get a place later, when there is room."""


class Shipped(msgspec.Struct, tag="shipped"):
    """Content of a `Ship` is in its place."""

    id: int
    names: list[bytes]
    nbytes: int
    failed: list[bytes] = []


FromEngine = (
    LoadingPhase | Ready | Failed | StepMessage | Begun | Refused | Forgotten | PagesShown | RoomGranted | Shipped
)

_encoder = msgspec.msgpack.Encoder()
_submits = msgspec.msgpack.Decoder(Submit)


def postponed(submit: Submit, size: int, batch: bool) -> Later:
    """The message for a request that takes long to prepare."""
    return Later(submit.id, submit.tenant, batch, size, _encoder.encode(submit))


def unpacked(later: Later) -> Submit:
    return _submits.decode(later.submit)


def pack(message: ToEngine | FromEngine) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE}")
    return len(body).to_bytes(HEADER, "little") + body


def body_length(header: bytes | bytearray | memoryview) -> int:
    """The length of the message that follows a header."""
    length = int.from_bytes(header, "little")
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE}")
    return length


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """For `ToEngine` or `FromEngine`."""
    return msgspec.msgpack.Decoder(kind)


# -- the engine's end of the socket

READ_BYTES = 64 << 10
READING_SECONDS, MOST_READING_SECONDS = 0.002, 0.02
"""The least and the most time for messages in one turn of the engine's loop; running requests wait meanwhile."""
READING_SHARE = 0.1
"""Messages may take this fraction of the time since the last turn, within the two bounds above: more of them arrive
during a long step."""
MOST_WAITING = 32 << 20
"""Bytes queued for the API before the engine blocks: about ten thousand steps of streaming."""
PATIENCE = 60.0
"""Seconds after which an API that reads nothing counts as gone."""


class ApiGone(Exception):
    """The API process does not read the socket any more."""


class Outbox:
    """The engine's messages to the API: written at once where the socket takes them, else by a thread while the engine
    goes on."""

    def __init__(self, connection: socket.socket, give_up: Callable[[str, BaseException], None]) -> None:
        """`give_up` is called with the writer thread's name and its error: nothing could be written any more."""
        self._connection, self._give_up = connection, give_up
        self._waiting: deque[memoryview] = deque()
        self._size = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_waiting, name="bankfull-writer", daemon=True).start()

    def send(self, message: bytes) -> None:
        """In the order of the calls. Returns at once unless MOST_WAITING bytes wait already."""
        with self._changed:
            if not self._waiting:
                message = message[self._write_now(message) :]
                if not message:
                    return
            deadline = time.monotonic() + PATIENCE
            while self._size and self._size + len(message) > MOST_WAITING:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise ApiGone
            self._waiting.append(memoryview(message))
            self._size += len(message)
            self._changed.notify_all()

    def _write_now(self, message: bytes) -> int:
        try:
            return self._connection.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ApiGone from error

    def _write_waiting(self) -> None:
        try:
            self._keep_writing()
        except BaseException as error:
            self._give_up(threading.current_thread().name, error)

    def _keep_writing(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                first = self._waiting[0]
            try:
                self._connection.sendall(first)
            except OSError:
                return  # the reader gets the same error, and ends the process
            with self._changed:
                # Only now: while a message is listed here, no other thread writes.
                self._waiting.popleft()
                self._size -= len(first)
                self._changed.notify_all()


class MessageHead(msgspec.Struct):
    """The readable part of a message that cannot be decoded."""

    type: str = ""
    id: int | None = None


class NotAMessage(Exception):
    """The data on the socket is not a message."""


class Inbox:
    """The API's messages, read on the engine's own thread: the bell of its loop. Other threads ring it by a pipe."""

    def __init__(self, connection: socket.socket, take: Callable[[ToEngine | MessageHead], None]) -> None:
        self._connection, self._take = connection, take
        self._owner = threading.get_ident()
        self._rung, self._rings = os.pipe()
        for end in (self._rung, self._rings):
            os.set_blocking(end, False)
        self._news, self._more = select.poll(), select.poll()
        self._news.register(connection, select.POLLIN)
        self._news.register(self._rung, select.POLLIN)
        self._more.register(connection, select.POLLIN)
        self._read = bytearray()
        self._decode = decoder(ToEngine).decode
        self._decode_head = decoder(MessageHead).decode
        self._waited_at = time.monotonic()

    def ring(self) -> None:
        if threading.get_ident() != self._owner:  # an action posted from within `wait` runs when that returns
            with suppress(BlockingIOError):  # the pipe is full: it rings anyway
                os.write(self._rings, b"!")

    def wait(self, seconds: float | None) -> None:
        """Handle the messages that have arrived. Raises ApiGone, or NotAMessage."""
        away = time.monotonic() - self._waited_at
        if self._whole() is not None:
            seconds = 0.0
        for file, _ in self._news.poll(None if seconds is None else math.ceil(1e3 * seconds)):
            if file == self._rung:
                os.read(self._rung, 4096)
            else:
                self._fill()
        ends = time.monotonic() + min(MOST_READING_SECONDS, max(READING_SECONDS, READING_SHARE * away))
        while (body := self._next()) is not None:
            self._take(self._decoded(body))
            if time.monotonic() > ends:
                break
            if self._whole() is None and self._more.poll(0):
                self._fill()
        self._waited_at = time.monotonic()

    def _fill(self) -> None:
        """Read at least one whole message, unless its end is late."""
        while self._whole() is None:
            try:
                got = self._connection.recv(READ_BYTES)
            except OSError as error:
                raise ApiGone from error
            if not got:
                raise ApiGone
            self._read += got
            if self._whole() is None and not self._more.poll(math.ceil(1e3 * READING_SECONDS)):
                return

    def _whole(self) -> int | None:
        """The end of the first message, if it has arrived."""
        if len(self._read) < HEADER:
            return None
        try:
            end = HEADER + body_length(self._read[:HEADER])
        except ValueError as error:
            raise NotAMessage(error) from None
        return end if len(self._read) >= end else None

    def _next(self) -> bytearray | None:
        end = self._whole()
        if end is None:
            return None
        body = self._read[HEADER:end]
        del self._read[:end]
        return body

    def _decoded(self, body: bytearray) -> ToEngine | MessageHead:
        try:
            message: ToEngine = self._decode(body)
            return message
        except msgspec.ValidationError as error:
            head = self._head(body)
            if head is None or head.id is None:
                raise NotAMessage(error) from None
            print(f"bankfull: a message of the API cannot be decoded: {error}", file=sys.stderr)
            return head
        except msgspec.MsgspecError as error:
            raise NotAMessage(error) from None

    def _head(self, body: bytearray) -> MessageHead | None:
        try:
            head: MessageHead = self._decode_head(body)
            return head
        except msgspec.MsgspecError:
            return None
