"""The static files of the console. Their headers forbid the browser to load from or send to other origins, to turn text
into markup or code, and to show the page in a frame.

The files contain no secrets and need no API key. All data comes from the API, with the key that the user enters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
PREFIX = "/console/"
STATE_PATH = PREFIX + "state"
"""The state document that the pages poll every second; it is not a static file."""
TABLES_PATH = PREFIX + "page_tables"
"""The page tables of running sequences, polled while their page is open."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    kind: str
    tag: str
    """ETag of the content; a browser that has it gets 304."""


def _read(file: Path) -> StaticFile:
    body = file.read_bytes()
    return StaticFile(body, TYPES[file.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


PAGES = {
    "/" if file.name == INDEX else PREFIX + file.name: _read(file)
    for file in sorted(FOLDER.iterdir())
    if file.suffix in TYPES
}
"""The static files by path, read once because they are few and small."""


async def show(request: Request) -> Response:
    page = PAGES[request.url.path]
    headers = {**HEADERS, "etag": page.tag}
    if request.headers.get("if-none-match") == page.tag:
        return Response(status_code=304, headers=headers)
    return Response(page.body, headers=headers, media_type=page.kind)


def page_routes() -> list[Route]:
    return [Route(path, show, methods=["GET"]) for path in PAGES]
