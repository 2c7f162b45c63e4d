"""Prompts as OpenAI's completions and embeddings take them: a text, a list of ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from bankfull.serve.errors import Refusal
from bankfull.serve.texts import SHORT_TEXT, Texts

Prompts = str | list[str | int | list[int]]
IDS_CHECKED_AT_ONCE = 4096


def split_prompts(given: Prompts, limit: int, param: str) -> list[str | list[int]]:
    """One entry per prompt."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise Refusal(f"{param} is empty: give at least one token.", param=param, code="empty_prompt")
    kinds = set(map(type, given))  # in one go: half a million entries fit into a body
    if int in kinds:
        if len(kinds) > 1:
            raise Refusal(f"{param} mixes token ids with texts: give one kind.", param=param)
        return [cast("list[int]", given)]
    if len(given) > limit:
        raise Refusal(f"{param} has {len(given)} entries: give at most {limit}.", param=param)
    return cast("list[str | list[int]]", given)


async def encode_prompt(
    texts: Texts, prompt: str | list[int], vocab: int, context: int | None, *, add_special: bool = True,
    param: str = "prompt",
) -> list[int]:  # fmt: skip
    if isinstance(prompt, str):
        short = len(prompt) <= SHORT_TEXT
        return await texts.run_short(short, texts.encode, prompt, context, add_special=add_special, param=param)
    return await checked_ids(texts, prompt, vocab, param)


async def checked_ids(texts: Texts, ids: Sequence[int], vocab: int, param: str) -> list[int]:
    if len(ids) <= IDS_CHECKED_AT_ONCE:  # quicker than a thread is reached
        return texts.check_ids(ids, vocab, param)
    return await texts.run(texts.check_ids, ids, vocab, param)
