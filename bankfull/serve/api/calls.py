"""Calls: the caller, the endpoint that answers, the parts of every API's schema, and the sampling parameters that
OpenAI's APIs share.

Unknown fields are refused by name: a parameter without effect is never ignored.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from bankfull.errors import RequestError
from bankfull.sample.params import SamplingParams, StructuredOutput
from bankfull.serve.api.errors import Problem, Refusal, openai_error
from bankfull.serve.api.sse import EventStream
from bankfull.serve.settings import Settings
from bankfull.submit import Submit

CALLER = "bankfull.caller"
"""The key of an ASGI scope under which authentication leaves the `Caller`."""

ON_RESERVE = "bankfull.on_reserve"
"""The key for whether its connection got only a reserved place, which is for probes and admins."""

Body = TypeVar("Body")

MAX_PRIORITY = 1000
MAX_SALT = 256
LONGEST_DEADLINE = 24 * 3600.0
MAX_VALUES, MAX_TEXTS, MAX_NESTS = 300_000, 131_072, 65_536
"""Values a body may have, texts among them (field names included), and lists and objects. Each costs time on the event
loop, and a body of 4 MiB could hold two million."""
MAX_PARTS = 16_384
"""Content parts and tool calls that the messages of one call may have."""

#: Parameters of other servers and of older clients -> the replacement here.
POINTERS = {
    "guided_json": 'structured_outputs={"json": ...}',
    "guided_regex": 'structured_outputs={"regex": ...}',
    "guided_choice": 'structured_outputs={"choice": ...}',
    "guided_grammar": 'structured_outputs={"grammar": ...}',
    "functions": "tools",
    "function_call": "tool_choice",
    "max_new_tokens": "max_tokens",
    "use_beam_search": "n with a temperature above 0",
    "chat_template": "the model's own template with chat_template_kwargs",
    "best_of": "n, and choose among the samples, or /v1/completions, which has best_of",
}

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller, and the values that the service itself adds to a call."""

    key: str | None = None
    """The name of the API key; None for a call without one."""
    salt: str = ""
    """Separates the cached prefixes of one key from those of another."""
    priority: int | None = None
    """Overrides the call's own priority: batch work."""

    def salted(self, cache_salt: str | None) -> str:
        """The two salts as one; no two pairs give the same salt."""
        return f"{len(self.salt)}:{self.salt}{cache_salt or ''}" if self.salt or cache_salt else ""

    def ranked(self, priority: int) -> int:
        return priority if self.priority is None else self.priority


class Api(Protocol):
    """One endpoint: from a body to an answer."""

    async def answer(self, body: bytes, caller: Caller) -> bytes | EventStream:
        """A whole JSON document, or a stream of events. Every error in the call is raised."""
        ...

    def spell(self, problem: Problem) -> bytes:
        """An error in this API's shape, as a JSON document."""
        ...


def spelled_at(apis: Mapping[str, Api], path: str, problem: Problem) -> bytes:
    """An error in the format of the path's API, or of the nearest one above it."""
    while path and path not in apis:
        path = path.rpartition("/")[0]
    return apis[path].spell(problem) if path else openai_error(problem)


def check_model(settings: Settings, name: str | None) -> str:
    """The name of the model for the answer; refuses the names of other models."""
    if name is not None and name not in settings.names:
        served = ", ".join(repr(served) for served in settings.names)
        raise Refusal(
            f"The model {name[:100]!r} is not served here: use {served}.",
            param="model",
            code="model_not_found",
            status=404,
        )
    return name or settings.names[0]


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


# -- parts of schemas


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(msgspec.Struct, forbid_unknown_fields=True):
    """The format of the output: exactly one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_drafts: bool = False
    """Whether the chunks of a chat have the draft tokens of their step: accepted ones, and rejected ones."""


class Served(Protocol):
    """Parameters of the service itself, which calls of all APIs have."""

    timeout: float | None
    priority: int | None
    cache_salt: str | None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Every parameter that chat and completions share. A record to be extended, because JSON has them side by side."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    speculative: bool | int | str | None = None
    """False or "off": no draft tokens for this call; a number: at most so many per step; a name: only those of a way
    of drafting that the server runs."""
    reference: str | None = None
    """A text that the answer may repeat: draft tokens are looked up in it."""
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = None
    """Number of the prompt's last tokens to keep; -1: as many as fit."""
    timeout: float | None = None
    """Seconds until the request is aborted."""
    priority: int | None = None
    """Lower runs first."""
    cache_salt: str | None = None
    """Only calls with the same salt share cached prefixes."""
    explain: bool | None = None
    """Whether the answer, or the last chunk of a stream, has a field of that name with an account of the time."""
    user: str | None = None
    """Ignored: for the caller's own records."""


_OWN_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
    "skip_special_tokens",
    "prompt_logprobs",
    "speculative",
    "reference",
)


_asked_bytes: ContextVar[int] = ContextVar("bankfull_asked_bytes", default=0)


def asked_bytes() -> int:
    """The size of this call's body, which bounds the work of rendering and tokenizing it."""
    return _asked_bytes.get()


def decode(body: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """A call's body; an invalid one is refused in one sentence."""
    _asked_bytes.set(len(body))
    refuse_crowd(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explained(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise Refusal("The body is nested too deeply.", code="invalid_json") from None


def refuse_crowd(body: bytes) -> None:
    """Counts the values in a body before it is decoded. Commas and brackets inside of texts do not count; finding the
    texts takes longer, so that is done only where the plain count is too high."""
    if len(body) <= 2 * MAX_NESTS or not _crowded(body, body.count(b'"')):
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"')
    outside = b"".join(plain.split(b'"')[::2]) if texts <= 2 * MAX_TEXTS else b""
    if _crowded(outside, texts):
        raise Refusal(
            f"The body holds too many values: give at most {MAX_VALUES} values, {MAX_TEXTS} texts and {MAX_NESTS} "
            "lists and objects.",
            code="too_many_values",
        )


def _crowded(text: bytes, quotes: int) -> bool:
    nests = text.count(b"[") + text.count(b"{")
    return quotes > 2 * MAX_TEXTS or nests > MAX_NESTS or nests + text.count(b",") > MAX_VALUES


class TextPart(Protocol):
    text: str


def text_of(content: str | Sequence[TextPart]) -> str:
    """The text of a message's content, one line for each part."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def refuse_parts(count: int, param: str) -> None:
    if count > MAX_PARTS:
        raise Refusal(f"{param} has {count} parts in all: give at most {MAX_PARTS}.", param=param)


def explained(message: str, at: str = "") -> Refusal:
    """The refusal for an error message of msgspec about the value at `at`."""
    message = message.replace("`$", f"`$.{at}", 1) if at else message
    if (unknown := _UNKNOWN.fullmatch(message)) is not None:
        name = " ".join(unknown["name"].split())[:80]
        param = f"{unknown['path']}.{name}" if unknown["path"] else name
        sentence = f"{param} is not a parameter that this server supports: leave it out."
        if not unknown["path"] and name in POINTERS:
            sentence = f"{param} is not supported: use {POINTERS[name]}."
        return Refusal(sentence, param=param, code="unsupported_parameter")
    match = _AT.fullmatch(message)
    what, path = (match["what"], match["path"]) if match is not None else (message, None)
    if path is None and (missing := re.search(r"required field `(.*)`", what)) is not None:
        path = missing[1]
    where = f"{path}: " if path else ""
    return Refusal(f"{where}{what}.", param=path or None, code="invalid_value")


def sampling_params(call: SamplingFields, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """The call's parameters over `defaults`; `more`: values that the API passes under names of its own."""
    given = {name: value for name in _OWN_NAMES if (value := getattr(call, name)) is not None}
    chosen = {**defaults, **given, **{name: value for name, value in more.items() if value is not None}}
    chosen["structured"] = structured_output(call.response_format, call.structured_outputs)
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise named(error) from None


def params_over(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """The given values over the defaults; None stands for a value that was not given."""
    return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


def named(error: RequestError) -> RequestError:
    """The error with its parameter: messages of SamplingParams begin with its name."""
    first = str(error).split(maxsplit=1)[0]
    return Refusal(str(error), param=first, code="invalid_value") if first in _SAMPLING else error


def structured_output(form: ResponseFormat | None, structured: Structured | None) -> StructuredOutput | None:
    if structured is not None:
        if form is not None and form.type != "text":
            raise Refusal("response_format and structured_outputs were both given: keep one.", param="response_format")
        given = {name: getattr(structured, name) for name in ("json", "regex", "choice", "grammar")}
        return _checked("structured_outputs", {name: value for name, value in given.items() if value is not None})
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return _checked("response_format", {"json": {"type": "object"}})
    if form.json_schema is None:
        raise Refusal("response_format of type json_schema needs json_schema.", param="response_format.json_schema")
    schema = form.json_schema.schema
    return _checked("response_format", {"json": {"type": "object"} if schema is None else schema})


def schema_text(param: str, schema: Mapping[str, Any]) -> str:
    """A JSON schema as text."""
    try:
        return msgspec.json.encode(schema).decode()
    except (RecursionError, msgspec.MsgspecError, TypeError) as error:
        raise Refusal(f"{param} is not a JSON schema: {error}.", param=param, code="invalid_value") from None


def _checked(param: str, given: Mapping[str, Any]) -> StructuredOutput:
    if isinstance(schema := given.get("json"), Mapping):
        given = {**given, "json": schema_text(param, schema)}
    try:
        return StructuredOutput(**given)
    except RequestError as error:
        raise Refusal(str(error).replace("structured", param, 1), param=param, code="invalid_value") from None


def submit_of(call: Served, caller: Caller, params: SamplingParams, **more: Any) -> Submit:
    """The call's request, still without its prompt. `more`: other fields of `Submit`."""
    priority, seconds, salt = call.priority or 0, call.timeout, call.cache_salt
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise Refusal(
            f"priority is {priority}: give an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}.", param="priority"
        )
    if seconds is not None and not 0 < seconds <= LONGEST_DEADLINE:
        raise Refusal(f"timeout is {seconds}: give seconds, up to {LONGEST_DEADLINE:.0f}.", param="timeout")
    if salt is not None and len(salt) > MAX_SALT:
        raise Refusal(f"cache_salt has {len(salt)} characters: give at most {MAX_SALT}.", param="cache_salt")
    return Submit(
        [],
        params,
        priority=caller.ranked(priority),
        salt=caller.salted(salt),
        deadline=None if seconds is None else time.monotonic() + seconds,
        **more,
    )


def truncation_of(tokens: int | None) -> int | None:
    if tokens is not None and tokens != -1 and tokens < 1:
        raise Refusal(
            f"truncate_prompt_tokens is {tokens}: give a number of tokens, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )
    return tokens
