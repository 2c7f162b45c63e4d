"""The protocol between the API process and the engine process: msgspec messages, each with a length prefix, over a
socket. Never pickle; a message longer than MAX_MESSAGE is not read. Behind a gateway each message is followed by a tag
(`handshake.proof.Seal`); the socket of a child process is a private pair, and needs none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bankfull.fleet.page_tables import PageTables as PageTables
from bankfull.fleet.reports import Facts as Facts
from bankfull.fleet.reports import Load as Load
from bankfull.fleet.reports import PrefixChanges as PrefixChanges
from bankfull.outputs import Delta, Logprob
from bankfull.submit import Submit

MAX_MESSAGE = 64 << 20
"""Bytes a message may have."""
HEADER = 4
"""Bytes of the length prefix, little-endian."""


# -- to the engine


class ExchangeEnds(msgspec.Struct):
    """The exchanges of the engines that decode (`state.exchange`), one for each."""

    files: list[int]
    """File descriptors of the exchanges in shared memory, which the engine inherits, in the order of these engines.
    Empty: they are filled over sockets."""
    nbytes: int
    """Bytes of each exchange."""
    own: int | None = None
    """The number of the exchange that this engine reads; None: it computes prompts, and writes to all."""
    engines: int = 0
    """How many exchanges there are, without shared memory."""
    secret: bytes = b""
    """What the two ends of a socket prove to each other. Empty for an engine behind a gateway, which inherits it
    (`handshake.inherited`): the connection of this message may cross a network."""
    tls: str = ""
    """The folder of `handshake.link_tls.LinkTls`, for sockets; empty: without TLS."""

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
    tells_weights: bool = False
    """Whether the engine reports the fingerprint of its weights although it is the only one: what is kept is bound to
    them."""
    exchange: ExchangeEnds | None = None
    """Set where engines that compute prompts hand them to engines that decode."""


class Enqueue(msgspec.Struct, tag="submit"):
    """A request, to be prepared between two steps."""

    submit: Submit


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
    tenant: str = ""


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


ToEngine = Configure | Enqueue | Later | Abort | ResetCache | ShowPages | Expect | Ship | Arrived

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
    runs: bool = False
    """The next step computes their prompts."""


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
    withdrawn: list[bytes] = []
    """Names whose places were taken back for another tenant."""


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
    """A decoder for `ToEngine` or `FromEngine`."""
    return msgspec.msgpack.Decoder(kind)
