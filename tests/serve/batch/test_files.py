"""/v1/files, with OpenAI's client and without."""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from bankfull.serve.batch.files import clean_name
from bankfull.serve.data.store import StoreLimits
from tests.serve.batch.test_batches import client_at, submit
from tests.serve.batch_app import RandomHandler, batch_app
from tests.serve.server import served

LIMITS = StoreLimits(file_bytes=3 << 20, owner_bytes=5 << 20, total_bytes=7 << 20)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served(batch_app(tmp_path, RandomHandler(0, seconds=5), limits=LIMITS)) as url:
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return client_at(url)


def put(client: openai.OpenAI, data: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, data), purpose="batch").id


def test_a_file_is_returned_unchanged(client: openai.OpenAI) -> None:
    data = os.urandom(2_500_000)
    file = client.files.create(
        file=("../../etc/pass\r\nwd", data), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert file.bytes == len(data) and file.expires_at == file.created_at + 7200 and "/" not in file.filename
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == data
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_are_listed_page_by_page_in_both_orders(client: openai.OpenAI) -> None:
    ids = [put(client, b"x") for _ in range(7)]
    assert [file.id for file in client.files.list(limit=3)] == ids[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
    assert list(client.files.list(purpose="batch_output")) == []
    with pytest.raises(openai.BadRequestError, match="after"):
        client.files.list(after="file-" + "0" * 32)


def test_one_key_never_sees_the_files_of_another(url: str, client: openai.OpenAI) -> None:
    id, other = put(client, b"secret"), client_at(url, "other")
    for call in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(id)
    assert list(other.files.list()) == []
    assert client.files.content(id).read() == b"secret"


def test_a_file_that_is_too_large_is_refused_with_and_without_content_length(url: str, tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 100_000

    headers = {"content-type": "multipart/form-data; boundary=b"}
    unannounced = httpx.post(f"{url}/v1/files", content=chunks(), headers=headers)
    announced = httpx.post(f"{url}/v1/files", files={"file": b"x" * 4_000_000}, data={"purpose": "batch"})
    for answer in (unannounced, announced):
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "file_too_large"
    assert not list((tmp_path / "incoming").iterdir()) and not list((tmp_path / "files").iterdir())


def test_quotas_have_their_own_messages_and_deleting_returns_them(url: str, client: openai.OpenAI) -> None:
    big = put(client, b"x" * (3 << 20))
    for attempt in range(3):
        with pytest.raises(openai.InternalServerError) as refused:
            put(client, b"x" * (3 << 20))
        assert refused.value.status_code == 507 and "delete some" in refused.value.message, attempt
    assert refused.value.response.headers["x-should-retry"] == "false", "otherwise the client would upload it again"
    with pytest.raises(openai.InternalServerError, match="no room"):
        for _ in range(2):
            put(client_at(url, "other"), b"x" * (5 << 19))
    client.files.delete(big)
    put(client, b"x" * (3 << 20))


@pytest.mark.parametrize(
    ("data", "files", "named"),
    [
        ({"purpose": "fine-tune"}, {"file": b"x"}, "purpose"),
        ({}, {"file": b"x"}, "purpose"),
        ({"purpose": "batch"}, {"other": b"x"}, "other"),
        ({"purpose": "batch", "surprise": "1"}, {"file": b"x"}, "surprise"),
        ({"purpose": "batch"}, {"file": b""}, "file"),
        ({"purpose": "batch", "expires_after[seconds]": "1"}, {"file": b"x"}, "expires_after"),
        ({"purpose": "x" * 100_000}, {"file": b"x"}, None),
    ],
)
def test_an_invalid_form_is_refused_with_the_name_of_the_field(url: str, tmp_path: Path, data, files, named) -> None:  # type: ignore[no-untyped-def]
    answer = httpx.post(f"{url}/v1/files", data=data, files=files)
    assert answer.status_code in (400, 413) and answer.json()["error"]["param"] == named
    assert not list((tmp_path / "files").iterdir()) and not list((tmp_path / "incoming").iterdir())


@pytest.mark.parametrize("body", [b"", b"--b\r\n", b"nonsense", b'--b\r\ncontent-disposition: form-data; name="file"'])
def test_a_form_that_cannot_be_parsed_is_refused(url: str, body: bytes) -> None:
    answer = httpx.post(f"{url}/v1/files", content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(f"{url}/v1/files", content=body).status_code == 400


@pytest.mark.parametrize("id", ["..%2f..%2fservice.db", "%2e%2e", "file-..", "lock", "file-" + "A" * 32, "x" * 2000])
def test_an_id_is_never_a_path(url: str, id: str) -> None:
    for path in (f"/v1/files/{id}", f"/v1/files/{id}/content", f"/v1/batches/{id}"):
        assert httpx.get(url + path).status_code == 404
    assert httpx.delete(f"{url}/v1/files/{id}").status_code == 404


def test_an_interrupted_upload_leaves_nothing(url: str, tmp_path: Path, client: openai.OpenAI) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    part = b'content-length: 2500000\r\n\r\n--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port)) as connection:
        connection.sendall(head + part + b"x" * 1_500_000)
    for _ in range(200):
        put(client, b"x")
        if not list((tmp_path / "incoming").iterdir()):
            return
    raise AssertionError("the partial upload is still there")


def test_the_input_of_a_running_batch_cannot_be_deleted(client: openai.OpenAI) -> None:
    from tests.serve.batch.test_batches import line

    batch = submit(client, [line("a")])
    with pytest.raises(openai.ConflictError, match=batch.id):
        client.files.delete(batch.input_file_id)


@pytest.mark.parametrize(
    ("given", "shown"),
    [("a/b\\c.jsonl", "c.jsonl"), ("..", "file"), ("", "file"), ("a\r\nb\0", "ab"), ("é.txt", "é.txt")],
)
def test_a_name_is_shown_without_folders_and_controls(given: str, shown: str) -> None:
    assert clean_name(given) == shown
    assert len(clean_name("x" * 1000)) == 255


def test_a_large_upload_is_not_held_in_memory(client: openai.OpenAI, tmp_path: Path) -> None:
    """Parts of the upload reach the store one by one."""
    sizes: list[int] = []
    from bankfull.serve.data.store import Upload

    original = Upload.write
    try:
        Upload.write = lambda self, data: (sizes.append(len(data)), original(self, data))[1]  # type: ignore[method-assign]
        client.files.create(file=("f", io.BytesIO(b"x" * 2_900_000)), purpose="batch")
    finally:
        Upload.write = original  # type: ignore[method-assign]
    assert sum(sizes) == 2_900_000 and max(sizes) < 2 << 20
