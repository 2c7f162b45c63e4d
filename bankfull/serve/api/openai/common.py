"""What OpenAI's APIs spell alike: usage, log-probabilities, which model is meant."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from bankfull import __version__
from bankfull.serve.api.errors import Refusal
from bankfull.serve.api.events import Usage
from bankfull.serve.engine.prompt_lines import TokenLine
from bankfull.serve.settings import Settings
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
    )


def check_model(settings: Settings, name: str | None) -> str:
    """How the answer names the model."""
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


def prompt_logprobs_reply(
    lines: Sequence[TokenLine | None] | None,
) -> list[dict[str, PromptLogprob] | None] | None:
    if lines is None:
        return None
    return [
        None if line is None else {str(token): PromptLogprob(*pair) for token, pair in line.items()} for line in lines
    ]


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token for people: one that is no whole text shows its bytes, so that no two of them look the same."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
