"""/v1/models: the served model, with its default sampling parameters."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bankfull.serve.api.calls import check_model
from bankfull.serve.api.texts import Texts
from bankfull.serve.engine.backend import Backend
from bankfull.serve.parsers.registry import format_of
from bankfull.serve.settings import Settings


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    sampling_defaults: dict[str, Any]
    tool_parser: str | None
    """The format in which calls of tools are written and read; None where the model has no chat template."""
    static_batch: int | None = None
    """The number of requests that each static batch waits for."""
    owned_by: Literal["bankfull"] = "bankfull"
    object: Literal["model"] = "model"
    parent: None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Models:
    def __init__(self, backend: Backend, texts: Texts, settings: Settings) -> None:
        self._backend, self._texts, self._settings = backend, texts, settings

    async def all(self, request: Request) -> Response:
        return _json(ModelList([self._model(name) for name in self._settings.names]))

    async def one(self, request: Request) -> Response:
        return _json(self._model(check_model(self._settings, request.path_params["name"])))

    def _model(self, name: str) -> ModelCard:
        facts = self._backend.facts
        defaults = self._texts.defaults if self._settings.use_generation_config else {}
        length = None if facts is None else facts.max_len
        template = self._texts.template
        parser = None if template is None else format_of(template.tool_source, template.takes_tools).name
        batch = None if facts is None else facts.static_batch or None
        return ModelCard(name, self._settings.created, self._settings.names[0], length, defaults, parser, batch)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
