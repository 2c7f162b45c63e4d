"""What the API process and the engine process say to each other: msgspec messages, each behind its length, over a
private socket. Never pickle; nothing longer than MAX_MESSAGE is read.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bankfull.sample.params import SamplingParams

MAX_MESSAGE = 64 << 20
HEADER = 4
"""Bytes of a message's length, little-endian."""


# -- to the engine


class Configure(msgspec.Struct, tag="configure"):
    """The first message: which model, and the options of `LLM`."""

    model: str
    options: dict[str, str | int | float | bool | None]
    threads: int | None = None
    """That compute; None: one for each core."""


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
    """Tell where the time went."""
    tenant: str = ""
    """On whose behalf: tenants share the engine evenly."""


class Later(msgspec.Struct, tag="later"):
    """A `Submit` that takes long to prepare. It is packed once more, so that the engine's loop need not even unpack it,
    and says what decides when its turn is."""

    id: int
    tenant: str
    batch: bool
    size: int
    """How long it may take to prepare, in characters or tokens."""
    submit: bytes


class Abort(msgspec.Struct, tag="abort"):
    ids: list[int]


class ResetCache(msgspec.Struct, tag="reset"):
    """Forget all prefixes that nobody uses; answered by `Forgotten`."""

    id: int


class Stop(msgspec.Struct, tag="stop"):
    """Finish nothing, leave at once: draining is the API's work."""


ToEngine = Configure | Submit | Later | Abort | ResetCache | Stop

LIGHT_PROMPT, LIGHT_TEXT, LIGHT_IDS = 4096, 256, 4096
"""Tokens, characters of stop strings and bad words, and allowed ids that are checked and made into tables between two
steps; whatever is larger, and every grammar, is prepared by a thread."""


def preparation(submit: Submit) -> int:
    """What preparing this request may take, in characters and tokens; 0: so little that it is done at once."""
    params = submit.params
    texts = sum(map(len, params.stop)) + sum(map(len, params.bad_words))
    ids = len(params.allowed_token_ids or ()) + len(params.banned_token_ids)
    structured = 0 if params.structured is None else 1 + len(params.structured.source)
    light = len(submit.prompt) <= LIGHT_PROMPT and texts <= LIGHT_TEXT and ids <= LIGHT_IDS
    return 0 if light and not structured and not submit.explain else len(submit.prompt) + texts + ids + structured


# -- from the engine


class Facts(msgspec.Struct):
    """What the API needs to know of the model that is loaded."""

    name: str
    max_len: int
    vocab: int
    rows: int
    pages: int
    page_tokens: int
    step_tokens: int
    dtype: str
    device: str
    ceilings: dict[str, float] | None = None
    """read_bytes_per_s, flops: this machine's for this model, if they were measured before; without flops where the
    model's arithmetic could not be."""


class Ready(msgspec.Struct, tag="ready"):
    """Loaded and warm."""

    facts: Facts


class Phase(msgspec.Struct, tag="phase"):
    """How far loading is: one line for people."""

    text: str


class Failed(msgspec.Struct, tag="failed"):
    """The model cannot be loaded as asked; the process leaves."""

    message: str


class Piece(msgspec.Struct, array_like=True):
    """What one step added to one sample of one request."""

    id: int
    index: int
    text: str
    tokens: list[int]
    logprobs: list[dict[int, tuple[float, str]]] | None = None
    """For each token: token id -> (log-probability, text); the chosen token first."""
    finish: str | None = None
    """stop, length, abort or error."""
    stop: int | str | None = None
    error: str | None = None


class Done(msgspec.Struct, array_like=True):
    """All samples of a request have ended."""

    id: int
    queue: float | None
    ttft: float | None
    seconds: float
    cached_tokens: int
    output_tokens: int
    prompt_logprobs: bytes | list[dict[int, tuple[float, str]] | None] | None = None
    """Packed as in `prompt_lines`, or for each token: token id -> (log-probability, text); the prompt's own first."""
    embedding: list[float] | None = None
    account: dict[str, Any] | None = None
    """Where the time went, if that was asked for."""


class Load(msgspec.Struct, array_like=True):
    """The engine's state after a step: raw material of metrics and admission."""

    running: int
    waiting: int
    waiting_tokens: int
    pages_used: int
    pages_total: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    steps: int
    busy: float
    """Seconds inside steps so far."""
    bytes_moved: float
    flops: float
    """What the meter says that all steps so far moved and computed; 0 where this machine was never measured."""
    decode_busy: float = 0.0
    decode_bytes: float = 0.0
    decode_flops: float = 0.0
    """The same three of the steps that did nothing but decode: the rest computed prompts too."""


class Step(msgspec.Struct, tag="step"):
    """One engine step, all requests together: written at once."""

    pieces: list[Piece]
    done: list[Done]
    load: Load


class Refused(msgspec.Struct, tag="refused"):
    """A request that never ran. `kind`: "request" (its own fault), "busy" (no room), "internal"."""

    id: int
    kind: str
    message: str


class Forgotten(msgspec.Struct, tag="forgotten"):
    id: int
    pages: int


FromEngine = Phase | Ready | Failed | Step | Refused | Forgotten

_encoder = msgspec.msgpack.Encoder()
_submits = msgspec.msgpack.Decoder(Submit)


def postponed(submit: Submit, size: int, batch: bool) -> Later:
    """The request as it is sent to the engine where preparing it takes long."""
    return Later(submit.id, submit.tenant, batch, size, _encoder.encode(submit))


def unpacked(later: Later) -> Submit:
    return _submits.decode(later.submit)


def pack(message: ToEngine | FromEngine) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE}")
    return len(body).to_bytes(HEADER, "little") + body


def body_length(header: bytes | bytearray | memoryview) -> int:
    """How long the message behind a header is."""
    length = int.from_bytes(header, "little")
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE}")
    return length


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """For `ToEngine` or `FromEngine`."""
    return msgspec.msgpack.Decoder(kind)
