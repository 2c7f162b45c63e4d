"""A backend that says what a test tells it to, cut wherever the test wants, and the application around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import tokenizers

from bankfull.fleet.page_tables import SequencePages
from bankfull.outputs import Delta, Logprob
from bankfull.serve.api.texts import Texts
from bankfull.serve.engine.wire import Facts, Load, PageTables, RequestDone
from bankfull.serve.settings import Settings
from bankfull.submit import Submit
from bankfull.text.template import ChatTemplate
from bankfull.text.tokenizer import Tokenizer
from bankfull.types import StepDrafts

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if mood %}{{ mood }}{% endif %}{# </think> #}"
)
FACTS = Facts("scripted", 512, 300, 8, 100, 16, 64, "float32", "cpu")


@lru_cache
def scripted_tokenizer() -> Tokenizer:
    """One token per byte, behind the special ones."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=0, special_tokens=SPECIAL, initial_alphabet=alphabet)
    backend.train_from_iterator([], trainer)
    return Tokenizer(backend, eos_ids=[backend.token_to_id("<|im_end|>")])


def scripted_texts(template: str | None = TEMPLATE, defaults: dict[str, object] | None = None) -> Texts:
    return Texts(scripted_tokenizer(), None if template is None else ChatTemplate(template), defaults or {})


def cut(text: str, size: int) -> list[str]:
    """Pieces of `size` characters."""
    return [text[at : at + size] for at in range(0, len(text), size)] or [""]


@dataclass
class Scripted:
    """Each sample gets the same pieces, one per engine step. Everything that it was asked is kept in `asked`."""

    pieces: Sequence[str] = ("Hello", " world")
    finish: str = "stop"
    stop: int | str | None = None
    error: BaseException | None = None
    """Raised behind the last piece (instead of the end)."""
    pause: float = 0.0
    cached: int = 0
    kept: Sequence[int] = ()
    """Tokens newly pinned by each breakpoint."""
    ready: bool = True
    says: str = "Not yet."
    restarts: int = 0
    failed_loads: int = 0
    optional: dict[str, str] = field(default_factory=dict)
    facts: Facts | None = field(default_factory=lambda: FACTS)
    load: Load | None = None
    scores: Sequence[float] = (-0.25,)
    """The log-probability of every token, for one sample after the other."""
    drafts: Sequence[StepDrafts] = ()
    """Of each piece, for calls that want to see them."""
    asked: list[Submit] = field(default_factory=list)
    running: int = 0
    sequences: Sequence[SequencePages] = ()

    async def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        self.asked.append(submit)
        prompt, params, pool = submit.prompt, submit.params, submit.pool
        self.running += 1
        try:
            tokens = 0
            last = len(self.pieces) - 1
            if pool is None and params.max_tokens != 0:
                for number, text in enumerate(self.pieces):
                    await asyncio.sleep(self.pause)
                    ids = scripted_tokenizer().encode(text)
                    ends = number == last and self.error is None
                    items: list[Delta | RequestDone] = []
                    for index in range(params.n):
                        tokens += len(ids)
                        score = self.scores[index % len(self.scores)]
                        lines = [_line(token, score) for token in ids] if params.logprobs is not None else None
                        finish, stop = (self.finish, self.stop) if ends else (None, None)
                        drafts = self.drafts[number] if params.include_drafts else None
                        items.append(Delta(1, index, text, ids, lines, finish, stop, drafts=drafts))
                    yield items
            if self.error is not None:
                raise self.error
            prompt_lines = None
            if params.prompt_logprobs is not None:
                prompt_lines = [None if i == 0 else _line(token) for i, token in enumerate(prompt)]
            embedding = [3.0, 4.0, float(len(prompt) * 0)] if pool else None
            account = {"seconds": 0.5, "summary": "Nothing was slow."} if submit.explain else None
            yield [
                RequestDone(1, 0.0, 0.0, 0.0, self.cached, tokens, prompt_lines, embedding, account, list(self.kept))
            ]
        finally:
            self.running -= 1

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        pass

    async def reset_cache(self) -> int:
        return 7

    async def page_tables(self) -> dict[str, PageTables]:
        return {"": PageTables([16], 90, 4, 6, 0, list(self.sequences), len(self.sequences), {3: 2})}


def _line(token: int, score: float = -0.25) -> dict[int, Logprob]:
    other = (token + 1) % 256
    words = scripted_tokenizer()
    return {token: Logprob(score, words.token_text(token)), other: Logprob(-2.0, words.token_text(other))}


def settings(**changes: object) -> Settings:
    return Settings(**{"names": ("tiny", "alias"), "keep_alive_seconds": 15.0, **changes})  # type: ignore[arg-type]
