"""Every upload, of any content and size, gets a response: success or a refusal."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bankfull.serve.guard.checks import Guard, access_policy
from bankfull.serve.guard.keys import Keyring
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import Watch
from tests.serve.batch_app import RandomHandler, batch_app
from tests.serve.listening import Listening, listening

GOOD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n--b--\r\n'
)
LARGE = 24 << 20
"""More bytes than the socket buffers hold before the server reads."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    folder: Path = tmp_path_factory.mktemp("store")
    app = batch_app(folder, RandomHandler(0))
    with listening(Watch(Guard(app, access_policy(Keyring(), host="127.0.0.1")), ServiceMetrics())) as made:
        yield made


def upload(server: Listening, form: bytes, kind: bytes = b"multipart/form-data; boundary=b") -> tuple[int, str]:
    """The status and the error message."""
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: %b\r\n" % kind
    message = server.send(head + b"content-length: %d\r\n\r\n" % len(form) + form)
    assert message, "the connection was reset"
    document = json.loads(message.partition(b"\r\n\r\n")[2])
    return int(message.split()[1]), document.get("error", {}).get("message", "")


@pytest.mark.parametrize("length", [1, 200, 257, 4000, 30_000])
def test_a_boundary_of_any_length(server: Listening, length: int) -> None:
    boundary = b"b" * length
    status, message = upload(
        server, GOOD.replace(b"--b", b"--" + boundary), b"multipart/form-data; boundary=" + boundary
    )
    assert status == 200 if length < 257 else (status == 400 and "boundary" in message)


@pytest.mark.parametrize(
    "start",
    [b"no form", b"--b\r\n\0\r\n\r\n", b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n', b"--b\r\nx"],
    ids=["no form", "bad header", "unknown field", "no colon"],
)
@pytest.mark.parametrize("size", [0, LARGE])
def test_a_form_that_is_invalid_from_its_start_is_refused_whatever_its_size(
    server: Listening, start: bytes, size: int
) -> None:
    status, message = upload(server, start + b"x" * size)
    assert status == 400 and "form" in message


def test_a_randomly_changed_form_is_stored_or_refused(server: Listening) -> None:
    chance = random.Random(7)
    statuses = set()
    for _ in range(200):
        form = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(form))
            match chance.randrange(4):
                case 0:
                    form[at] = chance.randrange(256)
                case 1:
                    del form[at : at + chance.randint(1, 20)]
                case 2:
                    form[at:at] = bytes([chance.choice(b"\r\n-:;=\"*' b\0")]) * chance.randint(1, 5)
                case _:
                    form[at:at] = form[chance.randrange(len(form)) :][: chance.randint(1, 30)]
        status, message = upload(server, bytes(form))
        statuses.add(status)
        assert status in (200, 400), message
    assert statuses == {200, 400}
