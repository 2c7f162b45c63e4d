"""The OpenAPI document, made from the very schemas that calls are checked with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from bankfull import __version__
from bankfull.serve.errors import ErrorReply
from bankfull.serve.messages import MessageErrorReply, MessageReply, TokenCount
from bankfull.serve.messages_call import CountTokensCall, MessagesCall
from bankfull.serve.models import Model, ModelList
from bankfull.serve.openai_chat import ChatCall, ChatReply
from bankfull.serve.openai_completions import CompletionCall, CompletionReply
from bankfull.serve.openai_embeddings import EmbeddingCall, EmbeddingReply
from bankfull.serve.responses import ResponseReply
from bankfull.serve.responses_call import ResponsesCall
from bankfull.serve.tokens import DetokenizeCall, DetokenizeReply, TokenizeCall, TokenizeReply

#: Path -> (what it does, the body, the answer).
POSTED: dict[str, tuple[str, Any, Any]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatCall, ChatReply),
    "/v1/responses": ("Answer a conversation, OpenAI's newer way", ResponsesCall, ResponseReply),
    "/v1/messages": ("Answer a conversation, Anthropic's way", MessagesCall, MessageReply),
    "/v1/messages/count_tokens": ("Count a conversation's tokens", CountTokensCall, TokenCount),
    "/v1/completions": ("Continue a text", CompletionCall, CompletionReply),
    "/v1/embeddings": ("Embed texts", EmbeddingCall, EmbeddingReply),
    "/tokenize": ("Text to token ids", TokenizeCall, TokenizeReply),
    "/detokenize": ("Token ids to text", DetokenizeCall, DetokenizeReply),
}
#: Paths whose errors have a shape of their own.
ERRORS = {"/v1/messages": MessageErrorReply, "/v1/messages/count_tokens": MessageErrorReply}
READ: dict[str, tuple[str, Any]] = {
    "/v1/models": ("List the served model's names", ModelList),
    "/v1/models/{name}": ("One of them", Model),
    "/version": ("The server's version", dict[str, str]),
    "/live": ("Whether the server answers", dict[str, str]),
    "/ready": ("Whether the engine can take a call", dict[str, str]),
    "/health": ("As /ready", dict[str, str]),
    "/openapi.json": ("This document", dict[str, Any]),
}


def document(paths: Collection[str]) -> dict[str, Any]:
    """Of those POST endpoints among `paths` that have a schema here, and of all that are read."""
    posted = {path: described for path, described in POSTED.items() if path in paths}
    types = [kind for _, body, reply in posted.values() for kind in (body, reply)]
    types += [kind for _, kind in READ.values()] + [ErrorReply, MessageErrorReply, dict[str, int]]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    found = dict(zip(map(str, types), schemas, strict=True))
    failure = _failure(found[str(ErrorReply)])
    described: dict[str, Any] = {}
    for path, (summary, body, reply) in posted.items():
        request = {"required": True, "content": _content(found[str(body)])}
        own_failure = _failure(found[str(ERRORS[path])]) if path in ERRORS else failure
        operation = _operation(summary, found[str(reply)], own_failure) | {"requestBody": request}
        described[path] = {"post": operation}
    for path, (summary, reply) in READ.items():
        described[path] = {"get": _operation(summary, found[str(reply)], failure)}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    described["/v1/models/{name}"]["get"]["parameters"] = [name]
    reset = _operation("Forget cached prefixes; needs an API key", found[str(dict[str, int])], failure)
    described["/reset_prefix_cache"] = {"post": reset}
    return {
        "openapi": "3.1.0",
        "info": {"title": "bankfull", "version": __version__},
        "paths": described,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(summary: str, reply: dict[str, Any], failure: dict[str, Any]) -> dict[str, Any]:
    success = {"description": "The answer", "content": _content(reply)}
    return {"summary": summary, "responses": {"200": success, "4XX": failure, "5XX": failure}}


def _failure(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "What went wrong", "content": _content(schema)}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
