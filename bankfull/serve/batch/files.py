"""/v1/files: upload, list, retrieve, content and delete, as OpenAI's clients call them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import msgspec
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from bankfull.serve.api.errors import Refusal
from bankfull.serve.data.store import FILE_ID, NoSuchFile, Store, StoredFile, TooLarge, Upload

Owner = Callable[[Request], str]
"""Whose call this is: the name of its key."""

WRITE_BYTES = 1 << 20
LONGEST_FIELD = 4096
FORM_BYTES = 64 << 10
"""What a form may have beside its file."""


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]


class FileReply(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class Deleted(msgspec.Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Identified(Protocol):
    id: str


Shown = TypeVar("Shown", bound=Identified)


class Page(msgspec.Struct, Generic[Shown]):
    """A part of a list."""

    data: list[Shown]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class Parameters(msgspec.Struct):
    """Of a list."""

    limit: int
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def file_routes(store: Store, owner_of: Owner) -> list[Route]:
    endpoints = _Endpoints(store, owner_of)
    return [
        Route("/v1/files", endpoints.create, methods=["POST"]),
        Route("/v1/files", endpoints.list, methods=["GET"]),
        Route("/v1/files/{id}", endpoints.retrieve, methods=["GET"]),
        Route("/v1/files/{id}", endpoints.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", endpoints.content, methods=["GET"]),
    ]


class _Endpoints:
    def __init__(self, store: Store, owner_of: Owner) -> None:
        self._store, self._owner_of = store, owner_of

    async def create(self, request: Request) -> Response:
        upload = await self._store.run(self._store.upload, self._owner_of(request))
        try:
            form = Form(request, self._store.limits.file_bytes)
            async for data in form.contents():
                await self._store.run(upload.write, data)
            file = await self._store.run(_finish, upload, form)
        except BaseException as error:
            await self._store.run(upload.abandon)
            if isinstance(error, ClientDisconnect):
                raise Refusal("The upload ended early.") from None
            raise
        return as_json(_reply(file))

    async def list(self, request: Request) -> Response:
        given = parameters(request, {"after", "limit", "order", "purpose"}, most=10_000, usual=10_000)
        files, more = await self._store.run(
            lambda: self._store.files(
                self._owner_of(request),
                after=given.after,
                limit=given.limit,
                newest_first=given.order == "desc",
                purpose=given.purpose,
            )
        )
        return as_json(page_of([_reply(file) for file in files], more))

    async def retrieve(self, request: Request) -> Response:
        return as_json(_reply(await self._found(request)))

    async def content(self, request: Request) -> Response:
        file = await self._found(request)
        place = self._store.place(file.id)
        if not place.is_file():  # somebody else removed it: the store never does before its entry is gone
            raise Refusal("The contents of this file are lost.", code="file_contents_lost", status=410)
        return FileResponse(
            place,
            media_type="application/octet-stream",
            filename=file.filename,
            headers={"x-content-type-options": "nosniff"},
        )

    async def delete(self, request: Request) -> Response:
        id = _checked(request)
        await self._store.run(self._store.delete, self._owner_of(request), id)
        return as_json(Deleted(id))

    async def _found(self, request: Request) -> StoredFile:
        return await self._store.run(self._store.file, self._owner_of(request), _checked(request))


class Form:
    """A multipart form, parsed while it arrives: `contents` yields the file's bytes, the rest is small."""

    def __init__(self, request: Request, file_bytes: int) -> None:
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise Refusal("An upload is a multipart/form-data form with the fields 'purpose' and 'file'.")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > file_bytes + FORM_BYTES:
            raise TooLarge(file_bytes)
        self._request, self._beside = request, 0
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._header, self._value = bytearray(), bytearray()
        self._name: str | None = None
        self._in_file = self._ended = False
        self._text, self._data = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_ends,
                    "on_end": self._form_ends,
                },
            )
        except FormParserError:  # it is too long
            raise Refusal("The form's boundary cannot be used; send a shorter one, as clients do.") from None

    async def contents(self) -> Any:
        try:
            async for chunk in self._request.stream():
                self._parser.write(chunk)
                if len(self._data) >= WRITE_BYTES:
                    yield self._taken()
        except FormParserError:
            raise Refusal("The form of the upload cannot be parsed.") from None
        if not self._ended:
            raise Refusal("The form of the upload ends too early.")
        if self.filename is None:
            raise Refusal("The form has no 'file'.", param="file")
        yield self._taken()

    def _taken(self) -> bytearray:
        data, self._data = self._data, bytearray()
        return data

    def _part_begins(self) -> None:
        self._headers, self._name, self._in_file = {}, None, False
        self._text = bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._count(len(self._header) + len(self._value))
        self._header, self._value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file":
            if self.filename is not None:
                raise Refusal("The form has two files; upload one at a time.", param="file")
            self.filename = clean_name(options.get(b"filename", b"").decode("utf-8", "replace"))
            self._in_file = True
        elif name not in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            raise Refusal(f"The form has a field {name[:80]!r}, which is not supported.", param=name[:80])
        elif name in self.fields:
            raise Refusal(f"The form has the field {name!r} twice.", param=name)
        self._name = name

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._data += data[start:end]
            return
        self._count(end - start)
        self._text += data[start:end]

    def _part_ends(self) -> None:
        if not self._in_file and self._name is not None:
            if len(self._text) > LONGEST_FIELD:
                raise Refusal(f"The field {self._name!r} is too long.", param=self._name)
            self.fields[self._name] = self._text.decode("utf-8", "replace")

    def _form_ends(self) -> None:
        self._ended = True

    def _count(self, amount: int) -> None:
        self._beside += amount
        if self._beside > FORM_BYTES:
            raise Refusal("The form has too much beside its file.", status=413)


def _finish(upload: Upload, form: Form) -> StoredFile:
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        raise Refusal("purpose must be 'batch': files serve nothing else here.", param="purpose")
    seconds = None
    if "expires_after[anchor]" in form.fields or "expires_after[seconds]" in form.fields:
        given = {"anchor": form.fields.get("expires_after[anchor]")}
        with suppress(ValueError):
            given["seconds"] = int(form.fields.get("expires_after[seconds]", ""))  # type: ignore[assignment]
        try:
            seconds = msgspec.convert(given, ExpiresAfter).seconds
        except msgspec.ValidationError:
            raise Refusal(
                "expires_after needs anchor=created_at and seconds between 3600 and 2592000.", param="expires_after"
            ) from None
    if not upload.bytes:
        raise Refusal("The file is empty.", param="file")
    return upload.finish(form.filename or "", purpose, seconds)


def clean_name(name: str) -> str:
    """Only shown, never used as a path; still without folders, controls and excess."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(character for character in last if character.isprintable())[:255]
    return shown if shown.strip(". ") else "file"


def as_json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def parameters(request: Request, known: set[str], *, most: int, usual: int) -> Parameters:
    """Of a list, from the query; what is not known is refused by name."""
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known or name in given:
            raise Refusal(
                f"The parameter {name[:80]!r} is {'given twice' if name in given else 'not supported'}.",
                param=name[:80],
            )
        given[name] = value
    limit = given.pop("limit", str(usual))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise Refusal(f"limit must be between 1 and {most}.", param="limit")
    if given.get("order", "asc") not in ("asc", "desc"):
        raise Refusal("order must be asc or desc.", param="order")
    return msgspec.convert({"limit": int(limit), **given}, Parameters)


def page_of(replies: list[Shown], more: bool) -> Page[Shown]:
    return Page(replies, more, replies[0].id if replies else None, replies[-1].id if replies else None)


def _checked(request: Request) -> str:
    id = request.path_params["id"]
    if FILE_ID.fullmatch(id) is None:
        raise NoSuchFile(id)
    return id


def _reply(file: StoredFile) -> FileReply:
    return FileReply(file.id, file.bytes, file.created_at, file.expires_at, file.filename, file.purpose)
