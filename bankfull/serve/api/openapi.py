"""The OpenAPI document, made from the very schemas that calls are checked with."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from bankfull import __version__
from bankfull.serve.api.anthropic.messages import MessageErrorReply, MessageReply, TokenCount
from bankfull.serve.api.anthropic.messages_call import CountTokensCall, MessagesCall
from bankfull.serve.api.errors import ErrorReply
from bankfull.serve.api.openai.chat_completions import ChatCall, ChatReply
from bankfull.serve.api.openai.completions import CompletionCall, CompletionReply
from bankfull.serve.api.openai.embeddings import EmbeddingCall, EmbeddingReply
from bankfull.serve.api.openai.models import ModelCard, ModelList
from bankfull.serve.api.openai.responses import ResponseReply
from bankfull.serve.api.openai.responses_call import ResponsesCall
from bankfull.serve.api.tokens import DetokenizeCall, DetokenizeReply, TokenizeCall, TokenizeReply
from bankfull.serve.batch.batches import BatchReply, CreateBatch
from bankfull.serve.batch.files import Deleted, FileReply, ListPage


class Health(msgspec.Struct):
    status: str
    without: dict[str, str]
    """Optional parts that were asked for and cannot be used, and why; the service answers without them."""


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
    "/v1/models/{name}": ("One of them", ModelCard),
    "/version": ("The server's version", dict[str, str]),
    "/live": ("Whether the server answers", dict[str, str]),
    "/ready": ("Whether the engine can take a call", dict[str, str]),
    "/health": ("As /ready, with the optional parts that cannot be used", Health),
    "/openapi.json": ("This document", dict[str, Any]),
}
#: (Path, method) -> (what it does, the answer, its parameters in the query): work that waits, where it is served.
WAITING: dict[tuple[str, str], tuple[str, Any, tuple[str, ...]]] = {
    ("/v1/files", "post"): ("Upload a file of requests", FileReply, ()),
    ("/v1/files", "get"): ("List files", ListPage[FileReply], ("after", "limit", "order", "purpose")),
    ("/v1/files/{id}", "get"): ("One of them", FileReply, ()),
    ("/v1/files/{id}", "delete"): ("Delete it", Deleted, ()),
    ("/v1/files/{id}/content", "get"): ("What is in it", bytes, ()),
    ("/v1/batches", "post"): ("Run a file of requests when there is time", BatchReply, ()),
    ("/v1/batches", "get"): ("List batches", ListPage[BatchReply], ("after", "limit")),
    ("/v1/batches/{id}", "get"): ("One of them", BatchReply, ()),
    ("/v1/batches/{id}/cancel", "post"): ("Cancel it; what has a result keeps it", BatchReply, ()),
}
#: An upload is a form.
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"enum": ["batch"]},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
}


def document(paths: Collection[str]) -> dict[str, Any]:
    """The document of those endpoints among `paths` that have a schema here, and of all that are read."""
    posted = {path: described for path, described in POSTED.items() if path in paths}
    waiting = {place: described for place, described in WAITING.items() if place[0] in paths}
    types = [kind for _, body, reply in posted.values() for kind in (body, reply)]
    types += [kind for _, kind in READ.values()] + [ErrorReply, MessageErrorReply, dict[str, int]]
    types += [reply for _, reply, _ in waiting.values()] + ([CreateBatch] if waiting else [])
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    references = dict(zip(map(str, types), schemas, strict=True))
    failure = _failure(references[str(ErrorReply)])
    described: dict[str, Any] = {}
    for path, (summary, body, reply) in posted.items():
        request = {"required": True, "content": _content(references[str(body)])}
        own_failure = _failure(references[str(ERRORS[path])]) if path in ERRORS else failure
        operation = _operation(summary, references[str(reply)], own_failure) | {"requestBody": request}
        described[path] = {"post": operation}
    for path, (summary, reply) in READ.items():
        described[path] = {"get": _operation(summary, references[str(reply)], failure)}
    described["/v1/models/{name}"]["get"]["parameters"] = [_parameter("name", "path")]
    reset = _operation("Forget cached prefixes; needs an API key", references[str(dict[str, int])], failure)
    described["/reset_prefix_cache"] = {"post": reset}
    for (path, method), (summary, reply, query) in waiting.items():
        operation = _operation(summary, references[str(reply)], failure)
        operation["parameters"] = [_parameter("id", "path")] if "{id}" in path else []
        operation["parameters"] += [_parameter(parameter, "query") for parameter in query]
        described.setdefault(path, {})[method] = operation
    if waiting:
        upload = {"multipart/form-data": {"schema": UPLOAD}}
        described["/v1/files"]["post"]["requestBody"] = {"required": True, "content": upload}
        create = _content(references[str(CreateBatch)])
        described["/v1/batches"]["post"]["requestBody"] = {"required": True, "content": create}
        described["/v1/files/{id}/content"]["get"]["responses"]["200"]["content"] = {"application/octet-stream": {}}
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


def _parameter(name: str, place: str) -> dict[str, Any]:
    kind = "integer" if name == "limit" else "string"
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": kind}}


def _failure(schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": "What went wrong", "content": _content(schema)}


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
