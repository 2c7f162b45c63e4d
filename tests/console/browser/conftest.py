"""A server, Debian's Chromium, and a page that must log no errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
KEY = "bf-a-key-for-the-tests-of-the-console"
OURS = re.compile(r"(blob:)?http://127\.0\.0\.1:\d+/")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Server:
    url: str
    key: str

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json", "x-api-key": self.key}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    @contextmanager
    def load(self, streams: int, tokens: int = 60) -> Iterator[None]:
        """Run this many clients, each sending one request after another."""
        ends = threading.Event()

        def client(number: int) -> None:
            turn = 0
            while not ends.is_set():
                turn += 1
                prompt = f"Client {number % 2} tells of the river, and then of the channel, for the {turn % 4}th time."
                body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
                self.ask("/v1/completions", body)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(streams)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ends.set()
            for thread in threads:
                thread.join()


@contextmanager
def running(cache: Path, key: str) -> Iterator[Server]:
    environment = {**os.environ, "BANKFULL_CACHE": str(cache), "BANKFULL_API_KEY": key}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.console.browser.serve_tiny"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        message = ""
        while "to stop it" not in message and (line := process.stdout.readline()):
            message += line
        url = re.search(r"in a browser +(http://127\.0\.0\.1:\d+)/", message)
        assert url is not None, message
        yield Server(url[1], key)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def server(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server that requires a key. It depends on the browser: without one no server is started."""
    with running(tmp_path_factory.mktemp("cache"), KEY) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser. Module scope, because Playwright runs its event loop on this thread and other tests have their
    own."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: see the extra `test`")
    found = os.environ.get("BANKFULL_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, its errors, and the URLs that it requested."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requested: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requested.add(request.url))


@pytest.fixture
def watched(chromium: Any) -> Iterator[Watched]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(30_000)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    assert watched.errors == []
    assert [address for address in watched.requested if not OURS.match(address)] == []


@pytest.fixture
def page(watched: Watched, server: Server) -> Any:
    """The console with the key already stored in its tab."""
    watched.page.context.add_init_script(f"sessionStorage.setItem('bankfull.key', '{KEY}')")
    watched.page.goto(server.url + "/")
    watched.page.wait_for_selector('#status[data-kind="good"]')
    return watched.page
