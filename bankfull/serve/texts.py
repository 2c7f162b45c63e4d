"""The served model's tokenizer, chat template and sampling defaults, in a process that never loads torch.

Rendering and tokenizing may take long: they run on threads, a bounded number of prompts at a time. A short text is done
before a thread would be reached, so it is done at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from bankfull.errors import BankfullError, ModelError
from bankfull.sample.params import SamplingParams
from bankfull.sample.recommended import recommended
from bankfull.serve.backend import Busy
from bankfull.serve.errors import ContextOverflow, Refusal
from bankfull.text.load import load_tokenizer
from bankfull.text.template import ChatTemplate, encode_chat
from bankfull.text.tokenizer import Tokenizer
from bankfull.weights.gguf_header import open_header
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.locate import locate

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")

THREADS = 2
SHORT_TEXT, SHORT_CONVERSATION = 1024, 16
"""Characters, and messages, that are rendered and tokenized on the event loop."""
SHORT_SECONDS = 0.005
"""What they may take of it. A template is a program: where it takes longer, the next DETOURS texts go to a thread."""
DETOURS = 1000
MAX_PREPARING = 512
MAX_LOGPROB_ENTRIES = 1 << 18
USUAL_ANSWER = 4096
"""What an answer without max_tokens is taken for when its log-probabilities are counted."""
MAX_CHARACTERS = 8_000_000


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What `load_tokenizer` reads of a model's files."""

    path: Path
    kind: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    metadata: Mapping[str, Any]


def open_text_files(path: Path) -> TextFiles:
    """Everything about a model's text, nothing about its tensors."""
    if path.is_dir():
        generation = path / "generation_config.json"
        config = normalize_config(read_json(path / "config.json"))
        return TextFiles(path, "hf", config, read_json(generation) if generation.exists() else {}, {})
    if path.suffix == ".gguf":
        return TextFiles(path, "gguf", {}, {}, open_header(path).metadata)
    raise ModelError(f"{path} is neither a .gguf file nor a model directory with a config.json")


class Texts:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, defaults: Mapping[str, Any]) -> None:
        """`defaults`: the sampling that applies where a call says nothing, under the names of SamplingParams."""
        self.tokenizer, self.template, self.defaults = tokenizer, template, dict(defaults)
        self._longest = max(len(token) for token in tokenizer.backend.get_vocab(with_added_tokens=True))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="bankfull-texts")
        self._preparing = 0
        self._detours = 0
        if template is not None:
            _ = template.variables  # one that is broken ends the start, not a call
            # What is made once, such as what the template can do, is not for the first call to wait for.
            with suppress(BankfullError):
                encode_chat(tokenizer, template, [{"role": "user", "content": "?"}])

    @classmethod
    def open(cls, model: str) -> Texts:
        """By path, hub id or short name; downloads what is not here."""
        files = open_text_files(locate(model))
        tokenizer, template = load_tokenizer(files)
        return cls(tokenizer, template, recommended(files, chats=template is not None))

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template itself has a place for tools."""
        return self.template is not None and self.template.takes_tools

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(
        self, work: Callable[Arguments, Made], *given: Arguments.args, **named: Arguments.kwargs
    ) -> Made:  # fmt: skip
        """`work` on a thread; Busy when too much waits for one."""
        if self._preparing >= MAX_PREPARING:
            raise Busy(f"{self._preparing} prompts already wait to be tokenized; try again later.", 1.0)
        self._preparing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*given, **named))
        finally:
            self._preparing -= 1

    async def run_if(self, long: bool, work: Callable[[], Made]) -> Made:
        """`work` on a thread if it may take long, else at once."""
        return await self.run(work) if long else work()

    async def run_short(
        self, short: bool, work: Callable[Arguments, Made], *given: Arguments.args, **named: Arguments.kwargs
    ) -> Made:  # fmt: skip
        """`work` on a text: at once if that is short, else on a thread, which takes two more wake-ups."""
        if not short or self._detours:
            self._detours = max(0, self._detours - 1)
            return await self.run(work, *given, **named)
        begun = time.perf_counter()  # the event loop waits for the template's process, too
        try:
            return work(*given, **named)
        finally:
            if time.perf_counter() - begun > SHORT_SECONDS:
                self._detours = DETOURS

    # -- on a thread, or at once where the text is short

    def encode(self, text: str, context: int | None, *, add_special: bool = True, param: str = "prompt") -> list[int]:
        """The ids of a text. `context`: what cannot fit into so many tokens is refused before it is read."""
        self._refuse_long(len(text), context, param)
        return self.tokenizer.encode(text, add_bos=None if add_special else False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], context: int | None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:  # fmt: skip
        if self.template is None:
            raise Refusal("This model has no chat template: use /v1/completions with a plain prompt.", param="messages")
        self._refuse_long(sum(map(_characters, messages)), context, "messages")
        given = dict(options or {})
        for name in ("messages", "tools", "add_generation_prompt", "tokenizer", "template"):
            if name in given:
                raise Refusal(f"chat_template_kwargs must not hold {name!r}.", param="chat_template_kwargs")
        return encode_chat(
            self.tokenizer, self.template, messages, tools=tools, add_generation_prompt=add_generation_prompt, **given
        )

    def check_ids(self, ids: Sequence[int], vocab: int, param: str = "prompt") -> list[int]:
        for token in ids:
            if not 0 <= token < vocab:
                raise Refusal(f"{param} holds the token {token}: ids go from 0 to {vocab - 1}.", param=param)
        return list(ids)

    def _refuse_long(self, characters: int, context: int | None, param: str) -> None:
        """No token spells more than the longest one: this many characters cannot fit, whatever they are."""
        if characters > MAX_CHARACTERS:
            raise Refusal(f"{param} has {characters} characters; give at most {MAX_CHARACTERS}.", param=param)
        if context is not None and characters > context * self._longest:
            raise ContextOverflow(
                f"{param} has {characters} characters, which cannot fit into the context of {context} tokens; "
                "shorten it.", param,
            )  # fmt: skip


def fit(ids: list[int], context: int, params: SamplingParams, truncate: int | None, param: str) -> list[int]:
    """The prompt as it will run: too long, it is cut at its beginning where the call asks for that, else refused."""
    if not ids:
        raise Refusal(f"{param} is empty: give at least one token.", param=param, code="empty_prompt")
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted >= context:
        raise ContextOverflow(
            f"max_tokens={wanted} leaves no room for a prompt in the context of {context} tokens; lower it.",
            "max_tokens",
        )
    if truncate is not None:
        ids = ids[-min(truncate if truncate > 0 else context, context - wanted) :]
    if len(ids) + wanted > context:
        asked = "" if params.max_tokens is None else f", with max_tokens={wanted} {len(ids) + wanted}"
        raise ContextOverflow(
            f"{param} has {len(ids)} tokens{asked}, but the context holds {context}; shorten it, lower max_tokens, or "
            "set truncate_prompt_tokens.", param,
        )  # fmt: skip
    refuse_bulk(len(ids), params, context)
    return ids


def refuse_bulk(prompt: int, params: SamplingParams, context: int) -> None:
    """Log-probabilities are many times as large as the text that they belong to."""
    following = params.max_tokens if params.max_tokens is not None else min(context - prompt, USUAL_ANSWER)
    entries = 0 if params.logprobs is None else params.n * following * (params.logprobs + 1)
    entries += 0 if params.prompt_logprobs is None else prompt * (params.prompt_logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise Refusal(
            f"The answer would hold {entries} log-probabilities, more than {MAX_LOGPROB_ENTRIES}: lower logprobs, "
            "prompt_logprobs, n or max_tokens.", param="logprobs", code="invalid_value",
        )  # fmt: skip


def _characters(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else 0


def is_short(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation is a few plain messages with little text."""
    values = [value for message in messages[:SHORT_CONVERSATION] for value in message.values()]
    if len(messages) > SHORT_CONVERSATION or not all(isinstance(value, str) for value in values):
        return False
    return sum(map(len, values)) <= SHORT_TEXT
