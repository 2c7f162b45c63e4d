"""Workloads: conversations of one or more turns, all generated before the first request is sent.

Prompts are token ids if the server offers /tokenize, so that their lengths are exact; otherwise texts of common words.
Reports use the token counts of the server.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import check_count

Prompt = str | list[int]
MOST_TOKENS = 1 << 20
"""Tokens that a prompt or an output may have."""
LARGEST_FILE = 2 << 30
BLOCK_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""
CHARACTERS_PER_TOKEN = 4.0
"""Estimate for English text without a tokenizer."""


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    prompt: Prompt
    """The text or ids that this turn adds to the conversation."""
    max_tokens: int
    tokens: int | None = None
    """Tokens of the prompt; None: known only to the server."""


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[ConversationTurn, ...]
    at: float | None = None
    """Start in seconds from the beginning of the run, if a trace defines it."""


# -- lengths


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of prompt or output lengths in tokens: "512" (constant), "100-900" (uniform), or "512~0.8"
    (log-normal: mean, and standard deviation relative to it)."""

    mean: float
    low: int
    high: int
    spread: float = 0.0

    def draw(self, numbers: random.Random) -> int:
        if self.spread:
            # Parameters of the underlying normal distribution for this mean and coefficient of variation.
            variance = math.log1p(self.spread**2)
            length = numbers.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
            return min(max(round(length), self.low), self.high)
        return self.low if self.low == self.high else numbers.randint(self.low, self.high)


def parse_lengths(text: str) -> Lengths:
    matched = re.fullmatch(r"\s*(\d{1,9})\s*(?:(-|~)\s*([0-9.]{1,9}))?\s*", text)
    try:
        if matched is None:
            raise ValueError
        first, how, second = int(matched[1]), matched[2], float(matched[3] or 0)
        if how == "~":
            lengths = Lengths(first, 1, MOST_TOKENS, second)
        else:
            last = int(second) if how else first
            lengths = Lengths((first + last) / 2, first, last)
    except ValueError:
        raise ConfigError(f"{text!r} is not a length in tokens; write 512, 100-900 or 512~0.8.") from None
    if (
        not 1 <= lengths.low <= lengths.high <= MOST_TOKENS
        or not 1 <= lengths.mean <= MOST_TOKENS
        or lengths.spread > 10
    ):
        raise ConfigError(f"The length {text!r} must lie between 1 and {MOST_TOKENS} tokens.")
    return lengths


# -- prompts


class PromptGenerator(Protocol):
    """Generates prompts of a given number of tokens, and counts the tokens of a text."""

    def take(self, numbers: random.Random, tokens: int) -> Prompt: ...

    def join(self, first: Prompt, second: Prompt) -> Prompt: ...

    def count(self, text: str) -> int: ...


class TokenizingServer(Protocol):
    def tokenize(self, text: str) -> list[int] | None: ...


class TokenIdPrompts:
    """Random ids among those of ordinary text, as tokenized by the server: lengths are exact."""

    def __init__(self, server: TokenizingServer, known: Sequence[int]) -> None:
        self._server, self._known = server, sorted(set(known))

    def take(self, numbers: random.Random, tokens: int) -> Prompt:
        return numbers.choices(self._known, k=tokens)

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        assert isinstance(first, list) and isinstance(second, list)
        return first + second

    def count(self, text: str) -> int:
        return len(self._server.tokenize(text) or ())


class TextPrompts:
    """Random words of ordinary text. Tokens per word are counted by the server if it can, otherwise estimated."""

    def __init__(self, server: TokenizingServer | None = None) -> None:
        self._server = server

    def take(self, numbers: random.Random, tokens: int) -> Prompt:
        words = max(1, round(tokens / self._tokens_per_word))
        return " ".join(numbers.choices(pool(), k=words))

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        return f"{first} {second}"

    def count(self, text: str) -> int:
        tokens = None if self._server is None else self._server.tokenize(text)
        return max(1, round(len(text) / CHARACTERS_PER_TOKEN)) if tokens is None else len(tokens)

    @cached_property
    def _tokens_per_word(self) -> float:
        sample = random.Random("words").choices(pool(), k=400)
        return max(0.25, self.count(" ".join(sample)) / len(sample))


def pool() -> list[str]:
    """Words of the evaluation texts."""
    if not _pool:
        folder = package_files("bankfull.quality") / "texts"
        texts = " ".join((folder / name).read_text() for name in ("story.txt", "papers.txt", "lesson.txt"))
        _pool.extend(sorted({word for word in re.findall(r"[a-z]+", texts.lower()) if len(word) > 2}))
    return _pool


_pool: list[str] = []
FEWEST_WORDS = 32
"""Words that prompts are made of, at least."""


def prompt_generator(server: TokenizingServer, how: str = "auto") -> PromptGenerator:
    """`how`: ids, text, or auto: ids if the server can tokenize."""
    if how not in ("auto", "ids", "text"):
        raise ConfigError(f"The kind of prompts {how!r} is unknown; use auto, ids or text.")
    if how == "text":
        return TextPrompts(server)
    words = pool()
    while (known := server.tokenize(" ".join(words))) is None and len(words) > FEWEST_WORDS:
        words = words[::2]  # the server may reject a text longer than its context
    if known is not None:
        return TokenIdPrompts(server, known)
    if how == "ids":
        raise ConfigError("The server has no /tokenize, so its token ids are unknown; use --prompts text.")
    return TextPrompts()


# -- workloads


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random prompts of given lengths. `prefixes`: each begins with one of a few shared prefixes. `turns`: turns of
    each conversation."""

    input: Lengths
    output: Lengths
    prefixes: int = 0
    prefix_tokens: int = 0
    turns: int = 1

    def __post_init__(self) -> None:
        if (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise ConfigError("Shared prefixes need both --prefixes (how many) and --prefix-len (tokens of each).")
        if self.prefixes < 0 or not 0 <= self.prefix_tokens <= MOST_TOKENS:
            raise ConfigError(
                f"{self.prefixes} prefixes of {self.prefix_tokens} tokens are out of range; use at least 0 prefixes of "
                f"at most {MOST_TOKENS} tokens."
            )
        if not 1 <= self.turns <= 1000:
            raise ConfigError(f"turns={self.turns} must lie between 1 and 1000.")

    def make(self, count: int, seed: int, prompts: PromptGenerator) -> list[Conversation]:
        check_count(count)
        numbers = random.Random(f"workload/{seed}")
        shared = [prompts.take(random.Random(f"prefix/{n}"), self.prefix_tokens) for n in range(self.prefixes)]
        return [self._one(numbers, prompts, shared) for _ in range(count)]

    def _one(self, numbers: random.Random, prompts: PromptGenerator, shared: list[Prompt]) -> Conversation:
        turns = []
        for turn in range(self.turns):
            length = self.input.draw(numbers)
            prompt = prompts.take(numbers, length)
            if shared and turn == 0:
                prompt, length = prompts.join(numbers.choice(shared), prompt), length + self.prefix_tokens
            turns.append(ConversationTurn(prompt, self.output.draw(numbers), length))
        return Conversation(tuple(turns))


class _ShareGptMessage(msgspec.Struct):
    value: str = ""
    speaker: str = msgspec.field(name="from", default="")
    role: str = ""
    content: str = ""


class _ShareGptRecord(msgspec.Struct):
    conversations: list[_ShareGptMessage] = []
    conversation: list[_ShareGptMessage] = []
    messages: list[_ShareGptMessage] = []


_ASKS = {"human", "user"}
_ANSWERS = {"gpt", "assistant", "chatgpt", "bing", "bard"}


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """A file in ShareGPT format: a list of {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}.

    Each output is as long as the recorded one, or as `output`. `turns`: turns replayed of each conversation, with the
    server's own outputs in between.
    """

    path: Path
    output: Lengths | None = None
    turns: int = 1

    def make(self, count: int, seed: int, prompts: PromptGenerator) -> list[Conversation]:
        check_count(count)
        records = _decoded(self.path, list[_ShareGptRecord])
        numbers = random.Random(f"workload/{seed}")
        numbers.shuffle(records)
        conversations: list[Conversation] = []
        for record in records:
            pairs = _pairs(record)[: self.turns]
            if pairs:
                conversations.append(
                    Conversation(tuple(self._turn(ask, said, numbers, prompts) for ask, said in pairs))
                )
            if len(conversations) == count:
                return conversations
        if not conversations:
            raise ConfigError(f"{self.path} has no conversation that begins with a user message and its answer.")
        return [conversations[number % len(conversations)] for number in range(count)]

    def _turn(self, ask: str, said: str, numbers: random.Random, prompts: PromptGenerator) -> ConversationTurn:
        wanted = prompts.count(said) if self.output is None else self.output.draw(numbers)
        return ConversationTurn(ask, min(max(1, wanted), MOST_TOKENS))


def _pairs(record: _ShareGptRecord) -> list[tuple[str, str]]:
    lines = record.conversations or record.conversation or record.messages
    said = [(line.speaker or line.role, line.value or line.content) for line in lines]
    while said and said[0][0] not in _ASKS:
        said = said[1:]
    pairs = []
    for (asker, question), (teller, reply) in zip(said[::2], said[1::2], strict=False):
        if asker not in _ASKS or teller not in _ANSWERS or not question.strip() or not reply.strip():
            break
        pairs.append((question, reply))
    return pairs


class _Line(msgspec.Struct):
    input_length: int
    output_length: int
    timestamp: float = 0.0
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """Recorded arrival times and lengths: JSON lines as of Mooncake (timestamp in milliseconds, input_length,
    output_length, and hash_ids, one per 512 tokens: equal ids are equal tokens), or a CSV file as of Azure (TIMESTAMP,
    ContextTokens, GeneratedTokens). `speed` 2 replays it in half the time."""

    path: Path
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"speed={self.speed} must be above 0.")

    def make(self, count: int, seed: int, prompts: PromptGenerator) -> list[Conversation]:
        """The first `count` requests, or all."""
        lines = _recorded(self.path, count)
        check_count(len(lines))
        begin = lines[0].timestamp
        return [
            Conversation((self._turn(line, f"{seed}/{number}", prompts),), (line.timestamp - begin) / 1e3 / self.speed)
            for number, line in enumerate(lines)
        ]

    def _turn(self, line: _Line, name: str, prompts: PromptGenerator) -> ConversationTurn:
        length, output = _checked(line, self.path)
        known = line.hash_ids[: length // BLOCK_TOKENS]
        parts = [prompts.take(random.Random(f"block/{block}"), BLOCK_TOKENS) for block in known]
        left = length - BLOCK_TOKENS * len(known)
        if left:
            parts.append(prompts.take(random.Random(f"trace/{name}"), left))
        prompt = parts[0]
        for part in parts[1:]:
            prompt = prompts.join(prompt, part)
        return ConversationTurn(prompt, max(1, output), length)


def recorded_lengths(path: Path, count: int) -> list[tuple[float, int, int]]:
    """The first `count` requests of a trace, or all: seconds from the first one, tokens of prompt and output."""
    lines = _recorded(path, count)
    begin = lines[0].timestamp
    lengths = (((line.timestamp - begin) / 1e3, *_checked(line, path)) for line in lines)
    return [(time, prompt, max(1, output)) for time, prompt, output in lengths]


def _recorded(path: Path, count: int) -> list[_Line]:
    lines = _table(path) if path.suffix.lower() == ".csv" else _lines(path)
    if not lines:
        raise ConfigError(f"The trace {path} contains no request.")
    return sorted(lines, key=lambda line: line.timestamp)[:count]


def _checked(line: _Line, path: Path) -> tuple[int, int]:
    length, output = line.input_length, line.output_length
    if not 1 <= length <= MOST_TOKENS or not 0 <= output <= MOST_TOKENS:
        raise ConfigError(
            f"The trace {path} has a request of {length} + {output} tokens; prompts need 1 and outputs 0 to "
            f"{MOST_TOKENS} tokens."
        )
    return length, output


Workload = Synthetic | ShareGpt | RecordedTrace


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{path} is larger than {LARGEST_FILE >> 30} GiB; split it first.")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None


def _decoded(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not in ShareGPT format: {error}.") from None


def _lines(path: Path) -> list[_Line]:
    decode = msgspec.json.Decoder(_Line).decode
    lines = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            lines.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"Line {number} of the trace {path} cannot be read: {error}.") from None
    return lines


def _table(path: Path) -> list[_Line]:
    import csv
    import io
    from datetime import datetime

    def milliseconds(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            # Azure writes seven fractional digits, one more than a datetime holds.
            return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text.strip())).timestamp() * 1e3

    rows = csv.DictReader(io.StringIO(_read(path).decode(errors="replace")))
    lines = []
    for number, row in enumerate(rows, 2):
        fields = {str(name).strip().lower(): value for name, value in row.items()}
        try:
            lines.append(
                _Line(
                    int(fields.get("contexttokens") or fields["input_length"]),
                    int(fields.get("generatedtokens") or fields["output_length"]),
                    milliseconds(fields["timestamp"]),
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"Line {number} of the trace {path} lacks TIMESTAMP, ContextTokens or GeneratedTokens ({error})."
            ) from None
    return lines
