"""The console in a real browser, with a real server and a tiny model."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.console.browser.conftest import KEY, Server, Watched
from tests.console.browser.replaceable import replaceable_server

PAGES = ("chat", "live", "requests", "memory", "batches")


def until(page: Any, condition: str, seconds: float = 30.0) -> None:
    """Poll until the condition holds; the page's security policy forbids Playwright's own wait for an expression."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"never: {condition}"
        page.wait_for_timeout(50)


def choose(page: Any, **parameters: object) -> None:
    for name, value in parameters.items():
        page.fill(f"#{name}", str(value))


def submit(page: Any, text: str) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def figures(page: Any, turn: int = -1) -> dict[str, str]:
    """The figures below a response, once they are shown."""
    place = page.locator(".turn.assistant").nth(turn).locator(".figures")
    place.wait_for()
    return dict(zip(place.locator("dt").all_inner_texts(), place.locator("dd").all_inner_texts(), strict=True))


def test_a_turn_of_chat_shows_its_speed_beside_the_limit(page: Any) -> None:
    # So many tokens that they do not all arrive at once, even if the machine is busy: one event has no speed.
    choose(page, max_tokens=150, temperature=0)
    submit(page, "What is a river?")
    shown = figures(page)
    assert re.fullmatch(r"[\d.]+ (ms|s|µs) limit [\d.]+ (ms|s|µs)", shown["TTFT"]), shown
    rate, limit = re.fullmatch(r"([\d.,]+) tokens/s limit ([\d.,]+)", shown["speed"]).groups()  # type: ignore[union-attr]
    share = float(rate.replace(",", "")) / float(limit.replace(",", ""))
    message = float(shown["of limit"].removesuffix(" %")) / 100
    assert abs(message - share) <= 0.011 + 0.5 * (share < 0.1) * share, shown
    assert page.locator(".turn.assistant .text").last.inner_text() != ""
    submit(page, "And what is a channel?")
    figures(page, 1)
    assert page.locator(".turn").count() == 4


def test_a_response_explains_its_speed_on_request(page: Any) -> None:
    choose(page, max_tokens=20, temperature=0)
    page.check("#explain")
    submit(page, "What is a river?")
    figures(page)
    assert re.search(r"\d+% of .*\.$", page.locator(".why").inner_text())


def test_draft_tokens_are_shown_on_request(page: Any) -> None:
    asked: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        asked.append(json.loads(route.request.post_data))
        steps = [
            {"tokens": ["The", " river", " flows"], "accepted": 2, "rejected": [" runs", " far"], "verified": 4},
            {"tokens": ["."], "accepted": 0, "rejected": [], "verified": 0},
        ]
        chunks = [{"choices": [{"delta": {"content": "".join(s["tokens"])}, "drafts": s}]} for s in steps]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    page.check("#drafts")
    submit(page, "What does a river do?")
    view = page.locator(".turn.assistant .drafts")
    view.wait_for()
    until(page, "document.querySelectorAll('.drafts .tokens > *').length === 5")
    assert view.locator(".accepted").all_inner_texts() == ["The", " river"]
    assert view.locator(".rejected").all_inner_texts() == [" runs far"]
    assert "flows" in view.locator(".rejected").get_attribute("title")
    assert view.locator("summary").inner_text() == "Draft tokens: 2 steps, 2 of 4 drafts accepted"
    assert page.locator(".turn.assistant .text").last.inner_text() == "The river flows."
    assert asked[0]["stream_options"] == {"include_usage": True, "include_drafts": True}


def test_the_log_follows_new_text_only_if_it_was_scrolled_to_the_end(page: Any) -> None:
    below = "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.querySelector('#log'))"
    choose(page, max_tokens=300, temperature=0)
    page.check("#explain")
    page.set_viewport_size({"width": 1280, "height": 500})
    for turn in range(2):
        submit(page, "Lines\n" * 12)
        figures(page, turn)
        assert page.evaluate(below) < 2, "the speed of the response is not visible"
    submit(page, "More")
    page.evaluate("document.querySelector('#log').scrollTop = 0")
    figures(page, 2)
    assert page.evaluate("document.querySelector('#log').scrollTop") == 0


def test_regenerating_replaces_the_last_response_only(page: Any) -> None:
    choose(page, max_tokens=12, temperature=0, seed=1)
    submit(page, "The river")
    figures(page)
    before = page.locator(".turn.assistant .text").last.inner_text()
    page.click("#regenerate")
    until(page, "document.querySelectorAll('.turn.assistant .figures').length === 1")
    page.wait_for_selector("#regenerate:enabled")
    assert page.locator(".turn.assistant .text").last.inner_text() == before
    assert page.locator(".turn").count() == 2
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def test_parameters_reach_the_server(page: Any, server: Server) -> None:
    page.fill("#system", "You are a river.")
    choose(page, max_tokens=3, temperature=0.5, top_p=0.9, top_k=20, min_p=0.01, seed=7, repetition_penalty=1.1)

    def talk_on(route: Any) -> None:
        """Keep the model from stopping early."""
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", talk_on)
    with page.expect_request("**/v1/chat/completions") as sent:
        submit(page, "Hello")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "You are a river."}
    wanted = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "seed": 7, "repetition_penalty": 1.1}
    assert wanted.items() <= body.items() and "frequency_penalty" not in body
    shown = figures(page)
    assert shown["tokens"].startswith("3 ") and shown["ended"] == "at max tokens"


def test_a_refusal_is_shown_and_the_message_is_kept(watched: Watched, page: Any) -> None:
    page.fill("#temperature", "-1")
    submit(page, "Hello")
    assert "temperature" in page.locator(".problem").inner_text()
    assert page.input_value("#question") == "Hello"
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "5")
    page.press("#question", "Enter")
    figures(page)
    watched.errors = [message for message in watched.errors if "400" not in message]


def test_a_response_can_be_stopped(page: Any, server: Server) -> None:
    choose(page, max_tokens=90000, temperature=0)
    submit(page, "Talk as long as you can")
    until(page, "document.querySelector('.turn.assistant > .text').textContent.length > 20")
    page.wait_for_timeout(1000)
    page.press("#question", "Escape")
    shown = figures(page)
    assert shown["ended"] == "stopped"
    deadline = time.monotonic() + 10
    while server.ask("/console/state")["load"]["running"]:
        assert time.monotonic() < deadline, "the engine still generates for a closed stream"
        time.sleep(0.1)


HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"


def test_text_of_users_and_models_never_becomes_markup(page: Any) -> None:
    deltas = [{"reasoning": HOSTILE}, {"content": HOSTILE}, {"content": HOSTILE}]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [], "explain": {"summary": HOSTILE}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    kind = "text/event-stream"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type=kind))
    submit(page, HOSTILE)
    figures(page)
    assert page.locator(".turn.user .text").inner_text() == HOSTILE
    assert page.locator(".turn.assistant > .text").inner_text() == 2 * HOSTILE
    assert page.locator(".thinking .text").text_content() == page.locator(".why").inner_text() == HOSTILE
    assert page.locator("#log img, #log script").count() == 0 and page.title() == "Chat · bankfull"


def test_a_message_without_a_response_is_not_part_of_the_conversation(page: Any, watched: Watched) -> None:
    choose(page, max_tokens=4)
    submit(page, "First")
    figures(page)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    submit(page, "Second")
    page.wait_for_selector(".problem")
    page.unroute("**/v1/chat/completions")
    assert page.input_value("#question") == "Second"
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click("#regenerate")
    assert [turn["content"] for turn in sent.value.post_data_json["messages"]] == ["First"]
    figures(page)
    assert page.locator(".turn").count() == 2, "the failed message was removed"
    with page.expect_request("**/v1/chat/completions") as sent:
        submit(page, "Third")
    assert [turn["role"] for turn in sent.value.post_data_json["messages"]] == ["user", "assistant", "user"]
    figures(page, 1)
    watched.errors = [message for message in watched.errors if "ERR_FAILED" not in message]


def chart(page: Any, title: str) -> Any:
    return page.locator("figure", has=page.get_by_role("heading", name=title, exact=True))


def operating_point(page: Any) -> tuple[float, float]:
    point = page.locator("#roofline circle.point-decode[r='7']")
    point.wait_for()
    return float(point.get_attribute("cx")), float(point.get_attribute("cy"))


def test_charts_move_under_load_and_so_does_the_operating_point(page: Any, server: Server) -> None:
    page.click('nav a[href="#live"]')
    with server.load(1, tokens=800):
        until(page, "/running 1/.test(document.querySelector('#charts').textContent)")
        page.wait_for_timeout(1500)
        alone = operating_point(page)
    with server.load(6, tokens=800):
        until(page, "/running [56]/.test(document.querySelector('#charts').textContent)")
        page.wait_for_timeout(2500)
        together = operating_point(page)
        for title in ("Requests", "Tokens per second", "Step time", "Engine busy"):
            curve = chart(page, title).locator("path.curve").first.get_attribute("d")
            assert len(set(re.findall(r"[ML][\d.]+ ([\d.]+)", curve))) > 1, f"{title} is flat: {curve}"
        step = re.search(r"step ([\d.]+) (\S+), limit ([\d.]+) (\S+)", chart(page, "Step time").inner_text())
        assert step is not None
        units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
        assert float(step[3]) * units[step[4]] < float(step[1]) * units[step[2]], (
            "a step must not be faster than its limit"
        )
    assert together[0] > alone[0], "six sequences share the weights, so there are more operations per byte"
    until(page, "document.querySelector('#roofline .value').textContent === 'idle'")
    assert "prompt tokens found" in chart(page, "Prefix cache hits").inner_text()


def test_arrow_keys_show_earlier_values(page: Any, server: Server) -> None:
    page.click('nav a[href="#live"]')
    until(page, "document.querySelectorAll('#tiles .tile').length > 0")
    until(page, "(document.querySelector('#charts path.curve').getAttribute('d').match(/L/g) ?? []).length > 1")
    requests = chart(page, "Requests")
    requests.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert re.match(r"\d+ s ago: running \d+, waiting \d+", requests.locator(".value").inner_text())
    assert "s ago" in requests.locator("svg").get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert "ago" not in requests.locator(".value").inner_text()


def test_the_table_has_each_request_with_its_time_line(page: Any, server: Server) -> None:
    choose(page, max_tokens=30, temperature=0)
    with page.expect_request("**/v1/chat/completions") as sent:
        submit(page, "Hello")
    figures(page)
    page.click('nav a[href="#requests"]')
    row = page.locator(f"tr[data-id='{sent.value.headers['x-request-id']}']")
    row.wait_for()
    assert row.locator(".badge").inner_text() in ("stop", "length")
    assert re.search(r"prefill [\d.]+ (ms|µs|s)", row.locator("svg").get_attribute("aria-label"))
    assert row.locator("rect.part-prompt").count() == 1
    with server.load(2, tokens=1000):
        page.locator(".badge", has_text="running").first.wait_for()


def batch_file(folder: Path, lines: int = 5, name: str = "questions.jsonl") -> Path:
    file = folder / name
    with file.open("w") as output:
        for number in range(lines):
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"{number}?"}], "max_tokens": 8}
            line = {"custom_id": f"n{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            output.write(json.dumps(line) + "\n")
    return file


def test_the_page_tables_of_running_sequences_show_what_they_share(page: Any, server: Server) -> None:
    page.click('nav a[href="#memory"]')
    until(page, "document.querySelector('#no-tables').hidden === false")
    with server.load(4, tokens=200):
        until(page, "document.querySelectorAll('#tables .page-row').length > 1")
        until(page, "document.querySelectorAll('#tables .pages li.shared').length > 1")
        shared = page.locator("#tables .pages li.shared").first
        assert re.fullmatch(r"page \d+: \d+ of \d+ tokens, held \d+ times", shared.get_attribute("title") or "")
        said = page.locator("#tables figcaption").inner_text()
        assert re.search(r"[\d,]+ pages held, [\d,]+ cached, [\d,]+ free", said)
    until(page, "document.querySelectorAll('#tables .page-row').length === 0")


def test_a_batch_is_uploaded_and_run_and_its_results_downloaded(page: Any, tmp_path: Path) -> None:
    page.click('nav a[href="#batches"]')
    page.set_input_files("#file", batch_file(tmp_path))
    page.click("#start")
    card = page.locator(".batch", has_text="questions.jsonl").first
    card.locator(".badge.ended").wait_for()
    assert "5 of 5 lines" in card.inner_text()
    with page.expect_download() as download:
        card.get_by_role("button", name="Results of questions.jsonl").click()
    results = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert {result["custom_id"] for result in results} == {f"n{number}" for number in range(5)}
    assert all(result["response"]["status_code"] == 200 for result in results)


def test_an_invalid_batch_names_the_wrong_line(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "faulty.jsonl"
    file.write_text(batch_file(tmp_path, 1).read_text() + "not JSON\n")
    page.click('nav a[href="#batches"]')
    page.set_input_files("#file", file)
    page.click("#start")
    card = page.locator(".batch", has_text="faulty.jsonl").first
    card.locator(".badge.bad").wait_for()
    assert "Line 2: " in card.inner_text()


def test_the_example_is_a_batch(page: Any, tmp_path: Path) -> None:
    page.click('nav a[href="#batches"]')
    with page.expect_download() as download:
        page.click("#example")
    example = tmp_path / "example.jsonl"
    download.value.save_as(example)
    page.set_input_files("#file", example)
    page.click("#start")
    page.locator(".batch", has_text="example.jsonl").first.locator(".badge.ended").wait_for()


def test_the_key_is_prompted_for_and_stored_in_this_tab_only(watched: Watched, server: Server, tmp_path: Path) -> None:
    page = watched.page
    page.goto(server.url + "/")
    page.wait_for_selector("#key-dialog[open]")
    page.keyboard.type("not-the-key-of-this-server")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('#key-why').textContent.includes('not valid on this server')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#key-dialog", state="hidden")
    page.wait_for_selector('#status[data-kind="bad"]')
    page.wait_for_timeout(1500)
    assert page.locator("#key-dialog[open]").count() == 0, "the prompt must not reopen after the user declined"
    page.click("#key")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector('#status[data-kind="good"]')
    choose(page, max_tokens=4, temperature=0)
    submit(page, "Hello")
    figures(page)
    page.click('nav a[href="#batches"]')
    page.set_input_files("#file", batch_file(tmp_path, 2, "secret.jsonl"))
    page.click("#start")
    card = page.locator(".batch", has_text="secret.jsonl").first
    card.locator(".badge.ended").wait_for()
    with page.expect_download() as download:
        card.get_by_role("button", name="Results of secret.jsonl").click()
    assert len(Path(download.value.path()).read_text().splitlines()) == 2
    page.reload()
    page.wait_for_selector('#status[data-kind="good"]')
    kept = page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
    assert not any(KEY in place for place in kept) and KEY not in "".join(watched.requested)
    other = page.context.new_page()
    other.goto(server.url + "/")
    other.wait_for_selector("#key-dialog[open]")
    watched.errors = [message for message in watched.errors if "401" not in message]


def test_everything_can_be_done_with_the_keyboard(page: Any, tmp_path: Path) -> None:
    def focused() -> str:
        return page.evaluate("document.activeElement.id || document.activeElement.getAttribute('href') || ''")

    def tab_to(wanted: str, key: str = "Tab") -> None:
        for _ in range(60):
            if focused() == wanted:
                outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", f"{wanted} does not show that it has the focus"
                return
            page.keyboard.press(key)
        raise AssertionError(f"{wanted} cannot be reached")

    assert focused() == "question"
    page.keyboard.type("Hello")
    tab_to("max_tokens")
    page.keyboard.press("Control+A")
    page.keyboard.type("5")
    tab_to("send", "Shift+Tab")
    page.keyboard.press("Enter")
    figures(page)
    assert focused() == "send", "the focus must return from Stop"
    tab_to("regenerate")
    page.keyboard.press("Space")
    page.wait_for_selector("#regenerate:enabled")
    for name in ("live", "requests", "batches", "chat"):
        tab_to(f"#{name}", "Shift+Tab" if name in ("live", "chat") else "Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#{name}:visible")
    page.keyboard.press("Shift+Enter")  # the input field has the focus again: a new line
    page.keyboard.type("x")
    assert page.input_value("#question") == "\nx"


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_pages_fit_any_screen(page: Any, server: Server, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 740})
    choose_open(page)
    submit(page, "A-very-long-word-" * 30)
    figures(page)
    down = page.evaluate("document.documentElement.scrollHeight - document.documentElement.clientHeight")
    assert down <= 0, "the input field and its buttons must be visible without scrolling"
    for name, drawn in zip(PAGES, (".turn", ".tile", "#lines tr", "#no-tables", "#upload"), strict=True):
        page.goto(f"{server.url}/#{name}")
        page.locator(f"#{name} {drawn}").first.wait_for()
        beyond = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert beyond <= 0, f"{name} is {beyond} pixels wider than a screen of {width}"
    if width != 800:  # at medium width the table has its own scroll bar
        page.goto(f"{server.url}/#requests")
        assert page.evaluate("(place => place.scrollWidth - place.clientWidth)(document.querySelector('.scroll'))") <= 0


def test_colours_follow_the_system_setting_and_are_legible(page: Any) -> None:
    for colours, ground in (("light", "rgb(245, 244, 240)"), ("dark", "rgb(20, 23, 27)")):
        page.emulate_media(color_scheme=colours)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        assert contrast(page, "--text", "--page") > 7 and contrast(page, "--soft", "--card") > 4.5
        for colour in ("--blue", "--orange", "--green", "--red"):
            assert contrast(page, colour, "--card") > 4.5, f"{colour} in {colours}"


def choose_open(page: Any) -> None:
    if not page.evaluate("document.querySelector('#parameters').open"):
        page.click("#parameters summary")
    choose(page, max_tokens=5)
    if page.viewport_size["width"] < 960:
        page.click("#parameters summary")


def contrast(page: Any, ink: str, ground: str) -> float:
    """The contrast ratio defined by WCAG."""
    return page.evaluate(
        """([ink, ground]) => {
          const place = document.body.appendChild(document.createElement("i"));
          const light = (name) => {
            place.style.color = `var(${name})`;
            const parts = getComputedStyle(place).color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
            const linear = parts.map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
          };
          const [high, low] = [light(ink), light(ground)].sort((a, b) => b - a);
          place.remove();
          return (high + 0.05) / (low + 0.05);
        }""",
        [ink, ground],
    )


def test_the_chosen_colours_are_stored(page: Any) -> None:
    page.click("#theme")
    page.click("#theme")
    assert page.inner_text("#theme") == "Dark"
    page.reload()
    assert page.inner_text("#theme") == "Dark"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


def test_the_page_notices_a_lost_server_and_connects_to_a_new_one(watched: Watched) -> None:
    page = watched.page
    with replaceable_server() as (url, replace):
        page.goto(url + "/")
        page.wait_for_selector('#status[data-kind="good"]')
        choose(page, max_tokens=2)
        submit(page, "x")
        figures(page)
        page.click('nav a[href="#requests"]')
        until(page, "document.querySelectorAll('#lines tbody tr').length === 1")
        page.context.set_offline(True)
        until(page, "document.querySelector('#status').textContent.includes('cannot be reached')")
        replace("another")
        page.context.set_offline(False)
        page.wait_for_selector('#status[data-kind="good"]')
        until(page, "document.querySelectorAll('#lines tbody tr').length === 0")
        until(page, "document.querySelector('#model').value === 'another'")
    watched.errors = [message for message in watched.errors if "ERR_INTERNET_DISCONNECTED" not in message]
