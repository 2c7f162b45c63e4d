"""`cache_control` of /v1/messages: what each mark pins, what usage and cost say of it, and which marks are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from anthropic.types import Message

from bankfull.errors import ConfigError
from bankfull.serve.api.prices import TokenPrices, parse_prices
from bankfull.serve.app import create_app
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import WatchedBackend
from tests.serve.api.test_messages import TOOL
from tests.serve.scripted import TEMPLATE, Scripted, scripted_texts, scripted_tokenizer, settings
from tests.serve.server import served
from tests.serve.test_ends import real_server

SHORT = {"type": "ephemeral"}
LONG = {"type": "ephemeral", "ttl": "1h"}
PRICES = TokenPrices(input=4.0, output=20.0, cached=0.5, write_5m=6.0, write_1h=8.0)


def text(value: str, control: dict[str, str] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": value, **({} if control is None else {"cache_control": control})}


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": content}], **more}


@contextmanager
def server_of(backend: Scripted, template: str = TEMPLATE, **changes: Any) -> Iterator[str]:
    app = create_app(backend, scripted_texts(template), settings(**{"pin_minimum": 1, **changes}))
    with served(app) as url:
        yield url


def pinned(body: dict[str, Any], template: str = TEMPLATE) -> list[tuple[str, float]]:
    """The texts that a call pins, and their lifetimes."""
    backend = Scripted()
    with server_of(backend, template) as url:
        response = httpx.post(f"{url}/v1/messages", json=body)
    assert response.status_code == 200, response.text
    [call] = backend.asked
    decode = scripted_tokenizer().decode
    return [(decode(call.prompt[:tokens], skip_special=False), seconds) for tokens, seconds in call.keeps]


def test_each_mark_pins_the_prompt_up_to_the_end_of_its_block() -> None:
    body = asked(
        [text("First", SHORT), text("second")],
        system=[text("Be brief.", LONG), text("Be kind.", SHORT)],
        tools=[TOOL | {"cache_control": LONG}],
    )
    tools, brief, kind, first = pinned(body)
    assert tools[1] == brief[1] == 3600.0 and kind[1] == first[1] == 300.0
    assert tools[0].endswith('"city": {"type": "string"}}}}}') and "Be brief" not in tools[0]
    assert brief[0].endswith("<|im_start|>system\nBe brief.")
    assert kind[0].endswith("Be brief.\nBe kind.")
    assert first[0].endswith("<|im_start|>user\nFirst")


def test_tool_calls_and_their_results_can_be_marked() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}, "cache_control": SHORT},
                {"type": "tool_use", "id": "2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [text("rain", SHORT), text("wind")]},
                {"type": "tool_result", "tool_use_id": "2", "content": "sun", "cache_control": SHORT},
                {"type": "tool_result", "tool_use_id": "2", "content": [text("dry")], "cache_control": SHORT},
            ],
        },
    ]
    call, rain, sun, dry = (found for found, _ in pinned({"max_tokens": 5, "messages": messages}))
    assert '{"city": "Bonn"}}' in call and call.count("weather") == 1  # the next call may have begun alike
    assert rain.endswith("rain") and sun.endswith("sun") and dry.endswith("dry")


@pytest.mark.parametrize("content", ["Hello", [text("Well,"), text("Hello")]], ids=["text", "blocks"])
def test_a_mark_of_the_whole_call_pins_it_up_to_its_last_block(content: Any) -> None:
    [(found, seconds)] = pinned(asked(content, cache_control=LONG))
    assert found.endswith("Hello") and seconds == 3600.0


def test_a_mark_on_the_last_block_and_on_the_call_is_one() -> None:
    assert len(pinned(asked([text("Hello", SHORT)], cache_control=SHORT))) == 1


def test_a_template_that_writes_tools_behind_the_system_prompt_pins_both() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% if loop.first and tools %}{{ tools }}{% endif %}{% endfor %}"
    body = asked("Hi", system="Be kind.", tools=[TOOL | {"cache_control": SHORT}])
    [(found, _)] = pinned(body, template + "<tool_call>")
    assert found.startswith("[Be kind.]") and "weather" in found and "Hi" not in found


def test_a_template_that_trims_its_texts_pins_all_but_the_trimmed_part() -> None:
    [(found, _)] = pinned(asked([text("Hello \n", SHORT)]), TEMPLATE.replace("m['content']", "m['content'] | trim"))
    assert found.endswith("Hello")


def test_a_prefix_below_the_minimum_is_not_pinned() -> None:
    backend = Scripted()
    with server_of(backend, pin_minimum=100) as url:
        body = asked([text("short", SHORT), text("long " * 30, SHORT), text("?")])
        assert httpx.post(f"{url}/v1/messages", json=body).status_code == 200
    [(tokens, _)] = backend.asked[0].keeps
    assert 150 < tokens < len(backend.asked[0].prompt)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (asked([text(str(i), SHORT) for i in range(5)]), "5 blocks with cache_control: give it to at most 4"),
        (
            asked([text("a", SHORT), text("b", LONG)]),
            "messages[0].content[1] has cache_control with ttl='1h' behind messages[0].content[0] with '5m'",
        ),
        (asked([text("", SHORT), text("b")]), "messages[0].content[0] is empty"),
        (asked([text("a", {"type": "ephemeral", "ttl": "2h"})]), "ttl"),
        (asked([text("a", {"type": "durable"})]), "type"),
        (asked([{"type": "thinking", "thinking": "a", "cache_control": SHORT}]), "cache_control"),
    ],
    ids=["five", "order", "empty", "ttl", "type", "thinking"],
)
@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_a_bad_mark_is_refused_with_one_sentence(body: dict[str, Any], reason: str, path: str) -> None:
    if path.endswith("count_tokens"):
        body = {name: value for name, value in body.items() if name != "max_tokens"}
    with server_of(Scripted()) as url:
        response = httpx.post(f"{url}/v1/{path}", json=body)
    assert response.status_code == 400 and reason in response.json()["error"]["message"]
    assert "\n" not in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_what_was_written_and_read_and_what_it_cost(stream: bool) -> None:
    backend = Scripted(["ab"], cached=10, kept=(4, 6, 8))
    body = asked([text("x" * 30, SHORT), text("y" * 9, SHORT)], system=[text("z" * 20, LONG)], stream=stream)
    with server_of(backend, prices=PRICES) as url:
        response = httpx.post(f"{url}/v1/messages", json=body)
    if stream:
        [line] = [line for line in response.text.splitlines() if line.startswith('data: {"type":"message_delta"')]
        usage = httpx.Response(200, text=line.removeprefix("data: ")).json()["usage"]
    else:
        usage = response.json()["usage"]
        assert Message.model_validate(response.json()).usage.cache_creation is not None
    prompt = len(backend.asked[0].prompt)
    assert usage["cache_creation_input_tokens"] == 18 and usage["cache_read_input_tokens"] == 10
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 14, "ephemeral_1h_input_tokens": 4}
    assert usage["input_tokens"] == prompt - 28
    cost = (prompt - 28) * 4.0 + 10 * 0.5 + 14 * 6.0 + 4 * 8.0 + 2 * 20.0
    assert usage["cost"] == pytest.approx(cost / 1e6, rel=1e-9)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("completions", {"prompt": "Hello"}),
        ("responses", {"input": "Hello"}),
    ],
)
def test_every_api_has_the_cost_only_where_the_server_has_prices(path: str, body: dict[str, Any]) -> None:
    for prices in (PRICES, None):
        backend = Scripted(["ab"], cached=3)
        with server_of(backend, prices=prices) as url:
            usage = httpx.post(f"{url}/v1/{path}", json=body).json()["usage"]
        cost = ((len(backend.asked[0].prompt) - 3) * 4.0 + 3 * 0.5 + 2 * 20.0) / 1e6
        assert usage.get("cost") == (None if prices is None else pytest.approx(cost))


def test_prices_that_are_not_given_follow_from_the_inputs() -> None:
    prices = parse_prices("output=15, input=3")
    assert (prices.cached, prices.write_5m, prices.write_1h) == pytest.approx((0.3, 3.75, 6.0))
    assert parse_prices("input=3,output=15,write-1h=4").write_1h == 4.0


@pytest.mark.parametrize("given", ["", "input", "input=3", "input=x, output=1", "input=-1, output=1", "in=1, output=2"])
def test_bad_prices_end_with_one_sentence(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^--prices .*input=3, output=15\.$"):
        parse_prices(given)


def test_pins_count_against_the_quota_of_the_key() -> None:
    secret, key = new_key("alice", pins=120)
    keyring, metrics = Keyring((key,)), ServiceMetrics("tiny")
    backend = WatchedBackend(Scripted(), metrics, keyring)
    app = create_app(backend, scripted_texts(), settings(pin_minimum=1))
    with served(protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics)) as url:

        def status(words: str, size: int, mark: bool = True) -> tuple[int, str]:
            body = asked([text(words * size, SHORT if mark else None)])
            found = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": secret})
            return found.status_code, found.json().get("error", {}).get("message", "")

        assert status("a", 60)[0] == 200
        assert status("a", 60)[0] == 200, "the same prefix counts once"
        code, why = status("b", 90)
        assert code == 429 and "the key alice has pinned" in why and "of its 120" in why
        assert status("b", 90, mark=False)[0] == 200
        code, why = status("c", 150)
        assert code == 400 and "the key alice may pin 120" in why


def test_a_real_server_pins_reads_and_refreshes() -> None:
    with real_server("--pin-minimum", "16", "--prices", "input=1, output=2") as (url, _):
        body = asked([text("The river runs at the full capacity of its channel. " * 4, SHORT), text("Why?")])
        first, second = (httpx.post(f"{url}/v1/messages", json=body, timeout=60).json()["usage"] for _ in range(2))
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
    assert first["cache_read_input_tokens"] == 0 and first["cache_creation_input_tokens"] >= 16
    assert second["cache_creation_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= first["cache_creation_input_tokens"]
    assert second["cost"] < first["cost"]
    [pins] = [line for line in metrics.splitlines() if line.startswith("bankfull:prefix_pins{")]
    assert float(pins.split()[-1]) == 1
