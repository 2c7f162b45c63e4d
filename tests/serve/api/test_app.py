"""Routes, errors of every kind in OpenAI's shape, and clients that leave."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest

from bankfull.fleet.reports import joined_optional
from bankfull.serve.api.calls import CALLER, Caller
from bankfull.serve.app import call_api, create_app
from bankfull.serve.engine.backend import Busy
from bankfull.serve.guard.checks import Guard, GuardLimits, access_policy
from bankfull.serve.guard.keys import Keyring
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.optional_parts import OptionalParts
from tests.serve.scripted import Scripted, scripted_texts, scripted_tokenizer, settings
from tests.serve.server import served

HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def http(backend: Scripted, **changes: Any) -> Iterator[httpx.Client]:
    app = create_app(backend, scripted_texts(), settings(**changes))
    with served(app) as url, httpx.Client(base_url=url) as client:
        yield client


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def test_errors_have_openais_shape_on_every_path() -> None:
    app = create_app(Scripted(), scripted_texts(), settings())
    guarded = Guard(app, access_policy(Keyring(), host="127.0.0.1"), GuardLimits(body_bytes=1000))
    with served(guarded) as url, httpx.Client(base_url=url) as client:
        refused(client.get("/nothing"), 404)
        refused(client.get("/v1/models/unknown"), 404)
        response = client.get("/v1/chat/completions")
        refused(response, 405)
        assert response.headers["allow"] == "POST"
        refused(client.post("/v1/completions", content=b"x" * 2000), 413)
        refused(client.post("/v1/completions", content=iter([b"x" * 600] * 3)), 413)
        for body in (b"", b"{", b"[1]", b"\xff", b'{"prompt": NaN}', b"[" * 900, b'{"prompt": "\\ud800"}'):
            error = refused(client.post("/v1/completions", content=body), 400)
            assert error["code"] in ("invalid_json", "invalid_value")


def test_an_optional_part_that_cannot_be_used_is_told_and_decides_nothing() -> None:
    backend = Scripted(optional={"kv_disk": "No space left on device"})
    parts = OptionalParts([lambda: backend.optional, lambda: {"response_cache": ""}])
    app = create_app(backend, scripted_texts(), settings(), unused_parts=parts.unused)
    metrics = ServiceMetrics("tiny")
    metrics.more.append(parts.families)
    with served(app) as url, httpx.Client(base_url=url) as client:
        assert client.get("/ready").json() == {"status": "ready"}
        health = client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "ready", "without": {"kv_disk": "No space left on device"}}
        backend.optional = {"kv_disk": ""}
        assert client.get("/health").json()["without"] == {}
        backend.ready = False
        assert client.get("/health").status_code == client.get("/ready").status_code == 503
    backend.optional = {"kv_disk": "No space left on device"}
    text = metrics.write(backend)
    assert 'optional_part_up{model_name="tiny",part="kv_disk"} 0' in text
    assert 'optional_part_up{model_name="tiny",part="response_cache"} 1' in text
    assert joined_optional([{"kv_disk": ""}, {"kv_disk": "full"}, {"kv_disk": "", "kv_host": ""}]) == {
        "kv_disk": "full",
        "kv_host": "",
    }


def test_an_unexpected_exception_tells_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Scripted):
        async def reset_cache(self) -> int:
            raise RuntimeError("/root/secret")

    def with_key(app: Any) -> Any:
        async def wrapped(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, CALLER: Caller("me")}, receive, send)

        return wrapped

    app = create_app(Broken(), scripted_texts(), settings())
    with served(with_key(app)) as url:
        error = refused(httpx.post(url + "/reset_prefix_cache"), 500)
    assert "secret" not in error["message"]
    reference = error["message"].rstrip(".").split()[-1]
    assert any(reference in record.getMessage() for record in caplog.records)


def test_the_prefix_cache_is_reset_by_callers_with_a_key_only() -> None:
    app = create_app(Scripted(), scripted_texts(), settings())

    async def keyed(scope: Any, receive: Any, send: Any) -> None:
        who = {CALLER: Caller("me")} if scope.get("query_string") == b"me" else {}
        await app({**scope, **who}, receive, send)

    with served(keyed) as url:
        refused(httpx.post(url + "/reset_prefix_cache"), 401)
        assert httpx.post(url + "/reset_prefix_cache?me").json() == {"pages": 7}


def test_probes_and_descriptions() -> None:
    backend = Scripted()
    with http(backend) as client:
        assert client.get("/live").json() == {"status": "live"}
        assert client.get("/ready").status_code == client.get("/health").status_code == 200
        assert client.get("/version").json()["version"]
        models = client.get("/v1/models").json()
        assert [model["id"] for model in models["data"]] == ["tiny", "alias"] and models["object"] == "list"
        assert models["data"][0]["max_model_len"] == 512 and models["data"][0]["static_batch"] is None
        assert backend.facts is not None
        backend.facts = msgspec.structs.replace(backend.facts, static_batch=8)
        assert client.get("/v1/models").json()["data"][0]["static_batch"] == 8
        backend.ready = False
        assert refused(client.get("/ready"), 503)["code"] == "engine_unavailable"
        assert client.get("/live").status_code == 200
        backend.facts = None
        refused(client.post("/v1/completions", json={"prompt": "x"}), 503)


def test_tokenize_and_back() -> None:
    with http(Scripted()) as client:
        made = client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
        assert made["tokens"] == scripted_tokenizer().encode("aé")
        assert made["count"] == 3 and made["max_model_len"] == 512
        assert made["token_strs"][0] == "a"
        assert client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "aé"}
        chat = client.post("/tokenize", json={"messages": HELLO}).json()
        assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("assistant\n")
        refused(client.post("/tokenize", json={}), 400)
        refused(client.post("/detokenize", json={"tokens": [999]}), 400)


def test_a_special_token_that_a_user_spells_stays_text() -> None:
    backend = Scripted()
    with http(backend) as client:
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "<|im_end|>"}]})
    end = scripted_tokenizer().backend.token_to_id("<|im_end|>")
    assert backend.asked[0].prompt.count(end) == 1, "only the template's own"


def test_the_openapi_document_has_every_route_and_every_parameter() -> None:
    with http(Scripted()) as client:
        document = client.get("/openapi.json").json()
        for path, operations in document["paths"].items():
            for method in operations:
                status = client.request(method, path.replace("{name}", "tiny")).status_code
                assert status not in (404, 405), path
    schema = document["components"]["schemas"]["ChatCall"]
    assert {"messages", "typical_p", "structured_outputs", "cache_salt", "timeout"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                yield reference
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_client_that_leaves_frees_its_request(stream: bool, after: float) -> None:
    backend = Scripted(["x"] * 1000, pause=0.05)
    with http(backend) as client:
        body = b'{"prompt": "x", "stream": %s}' % (b"true" if stream else b"false")
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        host, port = str(client.base_url).removeprefix("http://").split(":")
        with socket.create_connection((host, int(port.rstrip("/")))) as connection:
            connection.sendall(head + body)
            deadline = time.monotonic() + 5
            while not backend.running and time.monotonic() < deadline:
                time.sleep(0.01)
            assert backend.running == 1
            time.sleep(after)
        while backend.running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert backend.running == 0
        assert client.get("/live").status_code == 200


def test_a_connection_is_used_again_after_a_stream() -> None:
    with http(Scripted()) as client:
        for _ in range(3):
            with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
                assert response.read().endswith(b"[DONE]\n\n")


def test_calls_from_within_get_a_status_and_a_document() -> None:
    import asyncio
    import json

    backend = Scripted(["hi"])
    apis = create_app(backend, scripted_texts(), settings()).state.apis

    async def run() -> None:
        caller = Caller("batch", salt="k", priority=1_000_000)
        status, body = await call_api(apis, "/v1/completions", {"prompt": "x"}, caller)
        assert status == 200 and json.loads(body)["choices"][0]["text"] == "hi"
        assert backend.asked[0].priority == 1_000_000 and "k" in backend.asked[0].salt
        for path, given, expected in (
            ("/v1/completions", {"prompt": "x", "stream": True}, 400),
            ("/v1/completions", {"prompt": ""}, 400),
            ("/nothing", {}, 404),
        ):
            status, body = await call_api(apis, path, given, caller)
            assert status == expected and json.loads(body)["error"]["message"]
        backend.error = Busy("full", 1.0)
        with pytest.raises(Busy):
            await call_api(apis, "/v1/completions", {"prompt": "x"}, caller)
        assert backend.running == 0

    asyncio.run(run())


def test_salts_of_keys_and_of_calls_never_meet() -> None:
    salts = {Caller(salt=key).salted(own) for key in ("", "a", "ab", "a1:") for own in (None, "b", "1:b", "ab")}
    assert len(salts) == 16 and Caller().salted(None) == ""


def test_the_api_process_never_imports_torch() -> None:
    from tests.tiny import speaking_folder

    program = (
        "import sys; from bankfull.serve.api.texts import Texts, finished; import bankfull.serve.app; "
        f"texts = Texts.open({str(speaking_folder())!r}); "
        "ids = finished(texts.encode_chat([{'role': 'user', 'content': 'The river'}], 100)); "
        "assert texts.tokenizer.decode(ids).endswith('assistant\\n'); "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_the_texts_of_a_gguf_file_are_those_that_the_engine_reads(tmp_path: Any) -> None:
    from bankfull.serve.api.texts import Texts, finished, open_text_files
    from bankfull.weights.fetch import SHORT_NAMES, cached, installed

    path = installed(SHORT_NAMES["smollm2"]) or cached("smollm2", SHORT_NAMES["smollm2"])
    if path is None:
        pytest.skip("the default model is not on this machine")
    files = open_text_files(path)
    assert files.kind == "gguf" and files.metadata["general.architecture"] == "llama"
    texts = Texts.open("smollm2")
    assert texts.template is not None and texts.tokenizer.decode(finished(texts.encode("The river", 9))) == "The river"


def test_a_client_without_the_models_name_is_served_and_a_wrong_one_told() -> None:
    with served(create_app(Scripted(), scripted_texts(), settings())) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model="other", prompt="x")
            assert caught.value.code == "model_not_found"
        assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).json()["model"] == "tiny"
