"""The endpoints of /v1/files: upload, list, retrieve, content and delete, compatible with OpenAI's clients."""

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

OwnerOf = Callable[[Request], str]
"""Returns the owner of a request: the name of its API key."""

WRITE_BYTES = 1 << 20
LONGEST_FIELD = 4096
FORM_BYTES = 64 << 10
"""Bytes that a form may have besides its file."""


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


Listed = TypeVar("Listed", bound=Identified)


class ListPage(msgspec.Struct, Generic[Listed]):
    """One page of a list."""

    data: list[Listed]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class ListParameters(msgspec.Struct):
    """The query parameters of a list."""

    limit: int
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


def file_routes(store: Store, owner_of: OwnerOf) -> list[Route]:
    endpoints = FileEndpoints(store, owner_of)
    return [
        Route("/v1/files", endpoints.create, methods=["POST"]),
        Route("/v1/files", endpoints.list, methods=["GET"]),
        Route("/v1/files/{id}", endpoints.retrieve, methods=["GET"]),
        Route("/v1/files/{id}", endpoints.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", endpoints.content, methods=["GET"]),
    ]


class FileEndpoints:
    def __init__(self, store: Store, owner_of: OwnerOf) -> None:
        self._store, self._owner_of = store, owner_of

    async def create(self, request: Request) -> Response:
        upload = await self._store.run(self._store.upload, self._owner_of(request))
        try:
            form = UploadForm(request, self._store.limits.file_bytes)
            async for data in form.contents():
                await self._store.run(upload.write, data)
            file = await self._store.run(_finish, upload, form)
        except BaseException as error:
            await self._store.run(upload.abandon)
            if isinstance(error, ClientDisconnect):
                raise Refusal("The connection closed before the upload was complete; send it again.") from None
            raise
        return as_json(_reply(file))

    async def list(self, request: Request) -> Response:
        given = list_parameters(request, {"after", "limit", "order", "purpose"}, most=10_000, usual=10_000)
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
        return as_json(_reply(await self._file(request)))

    async def content(self, request: Request) -> Response:
        file = await self._file(request)
        place = self._store.path_of(file.id)
        if not place.is_file():  # deleted outside of the server: the store deletes the entry before the contents
            raise Refusal(
                "The contents of this file are missing on the server; upload it again.",
                code="file_contents_lost",
                status=410,
            )
        return FileResponse(
            place,
            media_type="application/octet-stream",
            filename=file.filename,
            headers={"x-content-type-options": "nosniff"},
        )

    async def delete(self, request: Request) -> Response:
        id = _file_id(request)
        await self._store.run(self._store.delete, self._owner_of(request), id)
        return as_json(Deleted(id))

    async def _file(self, request: Request) -> StoredFile:
        return await self._store.run(self._store.file, self._owner_of(request), _file_id(request))


class UploadForm:
    """A multipart form, parsed as it arrives: `contents` yields the bytes of the file; all other fields are small."""

    def __init__(self, request: Request, file_bytes: int) -> None:
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise Refusal("An upload must be a multipart/form-data form with the fields 'purpose' and 'file'.")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > file_bytes + FORM_BYTES:
            raise TooLarge(file_bytes)
        self._request, self._form_bytes = request, 0
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
        except FormParserError:  # longer than the parser allows
            raise Refusal("The boundary of the form is too long; send one of at most 256 bytes.") from None

    async def contents(self) -> Any:
        try:
            async for chunk in self._request.stream():
                self._parser.write(chunk)
                if len(self._data) >= WRITE_BYTES:
                    yield self._take()
        except FormParserError:
            raise Refusal("The upload is not a valid multipart form.") from None
        if not self._ended:
            raise Refusal("The form of the upload is incomplete; send it again.")
        if self.filename is None:
            raise Refusal("The form has no field 'file'.", param="file")
        yield self._take()

    def _take(self) -> bytearray:
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
            raise Refusal(f"The form has an unsupported field {name[:80]!r}.", param=name[:80])
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
        self._form_bytes += amount
        if self._form_bytes > FORM_BYTES:
            raise Refusal("The form has more than {FORM_BYTES >> 10} KiB besides its file.", status=413)


def _finish(upload: Upload, form: UploadForm) -> StoredFile:
    purpose = form.fields.get("purpose")
    if purpose != "batch":
        raise Refusal("purpose must be 'batch'; this server supports no other purpose.", param="purpose")
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
    """The file name to display. It is never used as a path, but loses folders, control characters and excess length."""
    last = name.replace("\\", "/").rsplit("/", 1)[-1]
    shown = "".join(character for character in last if character.isprintable())[:255]
    return shown if shown.strip(". ") else "file"


def as_json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def list_parameters(request: Request, known: set[str], *, most: int, usual: int) -> ListParameters:
    """The parameters of a list; an unknown one is refused by name."""
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
    return msgspec.convert({"limit": int(limit), **given}, ListParameters)


def page_of(replies: list[Listed], more: bool) -> ListPage[Listed]:
    return ListPage(replies, more, replies[0].id if replies else None, replies[-1].id if replies else None)


def _file_id(request: Request) -> str:
    id = request.path_params["id"]
    if FILE_ID.fullmatch(id) is None:
        raise NoSuchFile(id)
    return id


def _reply(file: StoredFile) -> FileReply:
    return FileReply(file.id, file.bytes, file.created_at, file.expires_at, file.filename, file.purpose)
