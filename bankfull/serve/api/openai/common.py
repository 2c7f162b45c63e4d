"""Parts that OpenAI's APIs share: usage and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bankfull import __version__
from bankfull.serve.api.events import Usage
from bankfull.serve.engine.prompt_lines import TokenLine
from bankfull.text.tokenizer import Tokenizer

FINGERPRINT = f"bankfull-{__version__}"


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    cost: float | msgspec.UnsetType = msgspec.UNSET
    """Cost by the server's prices, if it has any."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    decoded_token: str


def usage_reply(usage: Usage) -> UsageReply:
    return UsageReply(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptDetails(usage.cached_tokens),
        CompletionDetails(usage.reasoning_tokens),
        msgspec.UNSET if usage.cost is None else usage.cost,
    )


def prompt_logprobs_reply(
    lines: Sequence[TokenLine | None] | None,
) -> list[dict[str, PromptLogprob] | None] | None:
    if lines is None:
        return None
    return [
        None if line is None else {str(token): PromptLogprob(*pair) for token, pair in line.items()} for line in lines
    ]


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token's text for display: a token that is not valid UTF-8 shows its bytes, so that no two look the same."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
