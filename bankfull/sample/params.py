"""Sampling parameters of a request. All checks are here, once, before the request enters the engine."""

from __future__ import annotations

import json as json_text
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, TypeVar

from bankfull.errors import RequestError
from bankfull.familiar import sampling_options
from bankfull.speculation import SPECULATIVE

MAX_SAMPLES = 128
MAX_LOGPROBS = 64
MAX_STRINGS = 64
MAX_STRING_CHARS = 4096
MAX_TOTAL_CHARS = 8192
"""Characters of all stop strings together, and of all bad words: their tables cost time and memory per character."""
MAX_BAD_WORD_SEQUENCES = 256
MAX_BAD_WORD_TOKENS = 64
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 256
MAX_VOCAB = 2**22
MAX_LISTED_TOKENS = 2**18
"""Allowed or banned token ids: as many as large vocabularies have."""
MAX_TOKENS = 2**31 - 1
MAX_GRAMMAR_BYTES = 2**20
MAX_CHOICES = 4096

GrammarKind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The grammar of the output: exactly one of the fields. `json` is a JSON schema, kept as text."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured needs exactly one of json, regex, choice and grammar, but {_listed(given)} given: "
                "keep one of them."
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings("structured.choice", self.choice, MAX_CHOICES, None, None))
            if not self.choice:
                raise RequestError("structured.choice is empty: give at least one string to choose from.")
        elif self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", _schema_text(self.json))
        source = self.source
        if not isinstance(source, str):
            raise RequestError(f"structured.{self.kind} must be text, not {_shown(source)}: give a string.")
        try:
            size = len(source.encode())
        except UnicodeEncodeError:
            raise RequestError(f"structured.{self.kind} holds a lone surrogate: give valid Unicode text.") from None
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"structured.{self.kind} has {size} bytes, more than {MAX_GRAMMAR_BYTES}: give a smaller one."
            )

    @property
    def kind(self) -> GrammarKind:
        if self.json is not None:
            return "json"
        if self.regex is not None:
            return "regex"
        return "choice" if self.choice is not None else "grammar"

    @property
    def source(self) -> str:
        """The grammar as text; together with `kind` it identifies the grammar. Choices are a JSON list."""
        if self.choice is not None:
            return json_text.dumps(list(self.choice), ensure_ascii=False)
        return next(text for text in (self.json, self.regex, self.grammar) if text is not None)  # type: ignore[return-value]


_Class = TypeVar("_Class", bound=type)


def understands_familiar_names(cls: _Class) -> _Class:
    """Class decorator: accepts the names of other libraries for the fields, such as max_new_tokens."""
    names = frozenset(field.name for field in fields(cls))
    fill = cls.__init__  # type: ignore[misc]

    @wraps(fill)
    def init(self: object, **given: Any) -> None:
        if not given.keys() <= names:
            given = sampling_options(given)
            if unknown := sorted(given.keys() - names):
                raise RequestError(f"{cls.__name__} has no {unknown[0]!r}; it has {', '.join(sorted(names))}.")
        fill(self, **given)

    cls.__init__ = init  # type: ignore[misc]
    return cls


@understands_familiar_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names and defaults follow vLLM's; those of transformers are accepted, too (`bankfull.familiar`). Sequences are
    kept as tuples, `logit_bias` as a copy.

    `temperature` 0 is greedy; `top_k` 0 or -1, `top_p` 1, `min_p` 0 and `typical_p` 1 are off. `max_tokens` None means
    until the context is full. `logprobs` 0 gives the chosen token's own log-probability only. `bad_word_ids` are the
    token sequences of `bad_words`; the owner of the tokenizer fills them in with `dataclasses.replace`.

    `speculative` False or "off" verifies no draft tokens for this request; a number limits those of a step; a name
    chooses among the ways of drafting that the engine runs, of which True and "auto" take any. The tokens are the same.
    `reference` is a text that the answer may repeat (a file to edit, a document to quote): draft tokens are looked up
    in it. `include_drafts`: deltas have the accepted and rejected drafts of their step.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None
    speculative: bool | int | str = True
    reference: str | None = None
    include_drafts: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_sequences()
        self._check_contradictions()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def seeded(self, seed: int) -> SamplingParams:
        """The same parameters with this seed, not checked again: `dataclasses.replace` takes 77 us."""
        params = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:
            object.__setattr__(params, name, getattr(self, name))
        object.__setattr__(params, "seed", seed)
        return params

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_SAMPLES)
        _integer("top_k", self.top_k, -1, MAX_VOCAB)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        for name, low, high in (
            ("max_tokens", 0, MAX_TOKENS),
            ("seed", -(2**63), 2**63 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, low, high)
        for name, floor, ceiling in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("typical_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            object.__setattr__(self, name, _real(name, getattr(self, name), floor, ceiling))
        if 0.0 < self.temperature < 1e-4:
            raise RequestError(f"temperature is {self.temperature}, too small to divide by: use 0 for greedy decoding.")
        for name in ("top_p", "typical_p"):
            if getattr(self, name) == 0.0:
                raise RequestError(f"{name} is 0, which leaves no token: give a value above 0, up to 1.")
        if isinstance(self.speculative, str):
            if self.speculative not in SPECULATIVE:
                raise RequestError(
                    f"speculative is {_shown(self.speculative)}: give true, false, a number of draft tokens, or a way "
                    f"of drafting that runs here, of {', '.join(SPECULATIVE)}."
                )
        elif not isinstance(self.speculative, bool):
            _integer("speculative", self.speculative, 0, MAX_TOKENS)
        if not isinstance(self.reference, str | None):
            raise RequestError(f"reference must be a text, not {_shown(self.reference)}.")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "include_drafts"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {_shown(value)}.")

    def _check_sequences(self) -> None:
        keep = object.__setattr__
        keep(self, "stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        keep(self, "bad_words", _strings("bad_words", self.bad_words))
        keep(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS))
        keep(self, "banned_token_ids", _token_ids("banned_token_ids", self.banned_token_ids, MAX_LISTED_TOKENS))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_LISTED_TOKENS)
            keep(self, "allowed_token_ids", ids)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty, which allows no token: leave it out to allow all.")
        words = _items("bad_word_ids", self.bad_word_ids, MAX_BAD_WORD_SEQUENCES)
        keep(self, "bad_word_ids", tuple(_token_ids("bad_word_ids", ids, MAX_BAD_WORD_TOKENS) for ids in words))
        if not all(self.bad_word_ids):
            raise RequestError("bad_word_ids holds an empty sequence: each needs at least one token id.")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(f"logit_bias must map token ids to numbers, not be {_shown(self.logit_bias)}.")
            ids = _token_ids("logit_bias", list(self.logit_bias), MAX_BIASED_TOKENS)
            values = [_real("logit_bias", value, -100.0, 100.0) for value in self.logit_bias.values()]
            keep(self, "logit_bias", dict(zip(ids, values, strict=True)) or None)
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured must be a StructuredOutput, not {_shown(self.structured)}.")

    def _check_contradictions(self) -> None:
        if self.n > 1 and self.greedy:
            raise RequestError(
                f"n is {self.n} but temperature 0 gives {self.n} equal answers: "
                "use n=1, or a temperature above 0 for different ones."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}: "
                "lower min_tokens or raise max_tokens."
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings are looked for in text, but detokenize is false: set it to true, or use stop_token_ids."
            )
        if self.structured is not None and self.ignore_eos:
            raise RequestError(
                "structured output ends with the end token, which ignore_eos forbids: leave one of the two out."
            )
        allowed, banned = self.allowed_token_ids, self.banned_token_ids
        if allowed is not None and banned and set(allowed) <= set(banned):
            raise RequestError(
                "banned_token_ids holds every id of allowed_token_ids, which leaves no token: shorten one of them."
            )


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none is"
    return " and ".join((", ".join(names[:-1]), names[-1])) + " are"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: object, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, not {_shown(value)}.")
    if not low <= value <= high:
        raise RequestError(f"{name} is {_shown(value)}: give an integer from {low} to {high}.")
    return value


def _real(name: str, value: object, low: float, high: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} must be a number, not {_shown(value)}.")
    # The comparison is false for NaN too; comparing before converting keeps a huge int from overflowing a float.
    if not low <= value <= high or math.isnan(value):
        raise RequestError(f"{name} is {_shown(value)}: give a number from {low:g} to {high:g}.")
    return float(value)


def _items(name: str, values: object, limit: int) -> tuple[Any, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list, not {_shown(values)}.")
    try:
        count = len(values)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"{name} must be a list, not {_shown(values)}.") from None
    if count > limit:
        raise RequestError(f"{name} has {count} entries: give at most {limit}.")
    return tuple(values)


def _strings(
    name: str,
    values: object,
    limit: int = MAX_STRINGS,
    chars: int | None = MAX_STRING_CHARS,
    total: int | None = MAX_TOTAL_CHARS,
) -> tuple[str, ...]:
    strings = _items(name, values, limit)
    for text in strings:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} holds {_shown(text)}: each entry must be a string that is not empty.")
        if chars is not None and len(text) > chars:
            raise RequestError(f"{name} holds a string of {len(text)} characters: give at most {chars}.")
    if total is not None and (characters := sum(map(len, strings))) > total:
        raise RequestError(f"{name} has {characters} characters in all: give at most {total}.")
    return strings


def _token_ids(name: str, values: object, limit: int) -> tuple[int, ...]:
    ids = _items(name, values, limit)
    # All at once, for speed: they may be as many as a vocabulary has.
    if set(map(type, ids)) <= {int} and (not ids or (min(ids) >= 0 and max(ids) < MAX_VOCAB)):
        return ids
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < MAX_VOCAB:
            raise RequestError(f"{name} holds {_shown(token)}: token ids are integers from 0 to {MAX_VOCAB - 1}.")
    return ids


def _schema_text(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise RequestError(f"structured.json must be a JSON schema as text or as a dict, not {_shown(schema)}.")
    try:
        return json_text.dumps(dict(schema), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as problem:
        raise RequestError(f"structured.json is not a JSON schema ({problem}): give a dict of JSON values.") from None
