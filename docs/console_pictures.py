"""Takes docs/console-*.png of a server that really serves the default model, under load:

make install
.venv/bin/python docs/console_pictures.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent
PYTHON = sys.executable
CLIENTS, ROWS = 11, 8
SECONDS = 70
"""Of load, before the charts are taken."""
MEASUREMENTS = 4
LARGEST = 150_000
ABOUT = "You are a patient teacher of hydrology. Answer in plain words, with examples of rivers. "
TOPICS = ("floods", "deltas", "bankfull discharge", "meanders", "rapids", "the speed of water", "sediment", "dams")


def post(url: str, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=120).read()


def client(url: str, number: int, ends: threading.Event) -> None:
    turn = number
    while not ends.is_set():
        question = f"{ABOUT * 3}Tell me about {TOPICS[turn % len(TOPICS)]}."
        messages, most = [{"role": "user", "content": question}], 60 + 40 * (turn % 3)
        body = {"model": "smollm2", "messages": messages, "max_tokens": most, "ignore_eos": True}
        post(url, "/v1/chat/completions", body)
        turn += 3


def batch_of(folder: Path) -> Path:
    file = folder / "river-questions.jsonl"
    with file.open("w") as output:
        for number in range(400):
            messages = [{"role": "user", "content": f"What is river {number}?"}]
            body = {"model": "smollm2", "messages": messages, "max_tokens": 24}
            line = {"custom_id": f"question-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            output.write(json.dumps(line) + "\n")
    return file


def take(page: Any, name: str, colours: str) -> None:
    page.emulate_media(color_scheme=colours)
    page.wait_for_timeout(300)
    path = DOCS / f"console-{name}-{colours}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < LARGEST, f"{path.name} has {path.stat().st_size} bytes"


def measured(cache: Path) -> Path:
    """A cache with this machine's ceilings, the best of several measurements, and the models of the usual one."""
    found = "from bankfull.paths import cache_dir; print(cache_dir())"
    usual = Path(subprocess.run([PYTHON, "-c", found], check=True, capture_output=True, text=True).stdout.strip())
    cache.mkdir()
    (cache / "models").symlink_to(usual / "models")
    best, kept = 0.0, b""
    for _ in range(MEASUREMENTS):
        command = [PYTHON, "-m", "bankfull", "limits", "--refresh", "--json"]
        environment = {**os.environ, "BANKFULL_CACHE": str(cache)}
        told = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
        (file,) = cache.glob("ceilings-*.json")
        if (rate := json.loads(told)["cached_read_bytes_per_s"]) > best:
            best, kept = rate, file.read_bytes()
    file.write_bytes(kept)
    return cache


def main() -> None:
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    command = [PYTHON, "-m", "bankfull", "serve", "--port", "0", "--rows", str(ROWS), "--queue-requests", "100"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        environment = {**os.environ, "BANKFULL_CACHE": str(measured(Path(folder) / "cache"))}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        try:
            assert process.stdout is not None
            url = None
            while url is None and (line := process.stdout.readline()):
                url = re.search(r"in a browser +(\S+)/", line)
            assert url is not None, "the server did not start"
            browser = playwright.chromium.launch(
                executable_path=browser_path,
                args=["--disable-lcd-text"],  # coloured edges make large files
            )
            pictures(browser.new_page(viewport={"width": 1100, "height": 800}), url[1], Path(folder))
            browser.close()
        finally:
            process.terminate()
            process.wait(60)


def pictures(page: Any, url: str, folder: Path) -> None:
    page.set_default_timeout(60_000)
    page.goto(url + "/")
    page.wait_for_selector('#status[data-kind="good"]')
    page.fill("#max_tokens", "200")
    page.fill("#seed", "4")
    page.check("#explain")
    for number, question in enumerate(("What is a river?", "Why does it run faster when it is full?")):
        page.fill("#question", question)
        page.press("#question", "Enter")
        page.locator(".figures").nth(number).wait_for()
    take(page, "chat", "light")
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate("document.querySelector('#parameters').open = false")
    take(page, "phone", "dark")
    page.set_viewport_size({"width": 1100, "height": 1078})

    page.click('nav a[href="#live"]')
    ends = threading.Event()
    threads = [threading.Thread(target=client, args=(url, number, ends)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
        time.sleep(1.5)  # so that the charts show them come
    page.wait_for_timeout(SECONDS * 1000)
    take(page, "live", "dark")
    page.set_viewport_size({"width": 1100, "height": 640})
    page.click('nav a[href="#requests"]')
    page.wait_for_timeout(1500)
    take(page, "requests", "light")
    ends.set()
    for thread in threads:
        thread.join()

    page.click('nav a[href="#batches"]')
    page.click("#example")
    file = batch_of(folder)
    for name in ("warm-up.jsonl", file.name):
        lines = file.read_text().splitlines(keepends=True)
        chosen = folder / name
        chosen.write_text("".join(lines[:20] if name == "warm-up.jsonl" else lines))
        page.set_input_files("#file", chosen)
        page.click("#start")
        page.locator(".batch", has_text=name).wait_for()
    page.locator(".batch", has_text="warm-up.jsonl").locator(".badge.ended").wait_for()
    page.wait_for_timeout(4000)
    take(page, "batches", "dark")


if __name__ == "__main__":
    main()
