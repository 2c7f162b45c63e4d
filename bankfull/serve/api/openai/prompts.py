"""Prompts as OpenAI's completions and embeddings take them: a text, a list of ids, or a list of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from bankfull.serve.api.errors import ContextOverflow, Refusal
from bankfull.serve.api.texts import MAX_CHARACTERS, SHORT_TEXT, Texts, kept_tokens
from bankfull.serve.engine.wire import Facts

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
    if str in kinds and (characters := sum(len(text) for text in given if isinstance(text, str))) > MAX_CHARACTERS:
        raise Refusal(f"{param} has {characters} characters in all; give at most {MAX_CHARACTERS}.", param=param)
    return cast("list[str | list[int]]", given)


async def encode_prompt(
    texts: Texts,
    prompt: str | list[int],
    facts: Facts,
    truncate: int | None,
    *,
    add_special: bool = True,
    param: str = "prompt",
) -> list[int]:
    """A prompt as ids; of one that is to be cut, only those at its end are looked at."""
    context, keep = facts.max_len, kept_tokens(truncate, facts.max_len)
    if isinstance(prompt, str):
        return await texts.run_short(
            len(prompt) <= SHORT_TEXT,
            len(prompt),
            lambda: texts.encode(prompt, context, add_special=add_special, param=param, keep=keep),
        )
    if keep is None and len(prompt) > context:
        raise ContextOverflow(
            f"{param} has {len(prompt)} tokens, but the context holds {context}; shorten it, or set "
            "truncate_prompt_tokens.",
            param,
        )
    return await checked_ids(texts, prompt if keep is None else prompt[-keep:], facts.vocab, param)


async def checked_ids(texts: Texts, ids: Sequence[int], vocab: int, param: str) -> list[int]:
    if len(ids) <= IDS_CHECKED_AT_ONCE:  # quicker than a thread is reached
        return texts.check_ids(ids, vocab, param)
    return await texts.run(len(ids), lambda: texts.check_ids(ids, vocab, param))
