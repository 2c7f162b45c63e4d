"""The static files of the console: access, security headers, and no references to other origins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from bankfull.serve.api.openai.chat_completions import ChatCall
from bankfull.serve.app import create_app
from bankfull.serve.batch.input import ENDPOINTS
from bankfull.serve.console.pages import FOLDER, HEADERS, INDEX, PAGES, PREFIX
from bankfull.serve.console.state import console_routes
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.watch import WatchedBackend
from tests.serve.scripted import Scripted, scripted_texts, settings
from tests.serve.server import served

DOCS = Path(__file__).parents[2] / "docs"
NAMESPACE = "http://www.w3.org/2000/svg"
TEXTS = {file.name: file.read_text() for file in sorted(FOLDER.iterdir())}
SCRIPTS = [name for name in TEXTS if name.endswith(".js")]
_, KEY = new_key("alice")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that requires a key."""
    keyring, metrics, chosen = Keyring((KEY,)), ServiceMetrics(), settings()
    backend = WatchedBackend(Scripted(), metrics, keyring)
    app = create_app(backend, scripted_texts(), chosen)
    app.router.routes.extend(console_routes(backend, metrics, backend.lines, chosen))
    with served(protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics)) as address:
        yield address


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_no_key_and_has_a_strict_policy(url: str, path: str) -> None:
    answer = httpx.get(url + path)
    assert answer.status_code == 200 and answer.content == PAGES[path].body
    assert HEADERS.items() <= dict(answer.headers).items()
    again = httpx.get(url + path, headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b"" and HEADERS.items() <= dict(again.headers).items()
    assert httpx.head(url + path).status_code == 200
    assert httpx.post(url + path).status_code == 405


def test_the_policy_allows_only_own_files_and_calls() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    own = {name for name, allowed in policy.items() if allowed == "'self'"}
    assert own == {"script-src", "style-src", "img-src", "connect-src"}
    closed = {"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"}
    closed |= {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}
    assert {name: policy[name] for name in policy.keys() - own} == closed


def test_callers_without_a_key_get_only_the_pages(url: str) -> None:
    for path in ("/console/state", "/console", "/console/", "/console/nothing.js", "/console/../metrics", "/main.js"):
        assert httpx.get(url + path).status_code == 401, path
    foreign = {"host": "attacker.example.com"}
    assert httpx.get(url + "/", headers=foreign).status_code == 421, "a page on a foreign host could call the server"


def test_every_file_is_served_and_they_are_small() -> None:
    assert {"/" if name == INDEX else PREFIX + name for name in TEXTS} == set(PAGES)
    assert sum(len(page.body) for page in PAGES.values()) < 100_000
    assert max(len(text) for name in SCRIPTS for text in [TEXTS[name]]) < 16_000


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_refers_to_no_other_origin_and_creates_no_markup(name: str) -> None:
    text = TEXTS[name].replace(NAMESPACE, "")
    assert re.findall(r"(?:[a-z]+:)?//[a-z0-9]", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)) == []
    assert "@import" not in text and "url(" not in text
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\bstyle=|\bon[a-z]+=\""
    assert re.findall(forbidden, text) == []
    assert [line for line in text.splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_modules_import_what_others_export(name: str) -> None:
    for names, module in re.findall(r"import \{ ([^}]+) \} from \"\./([a-z]+\.js)\"", TEXTS[name]):
        exported = set(re.findall(r"^export (?:async )?(?:function\*?|class|const) (\w+)", TEXTS[module], re.MULTILINE))
        assert {part.strip() for part in names.split(",")} <= exported, f"{name} imports a missing name from {module}"
    assert re.findall(r"\bfrom \"(?!\./)", TEXTS[name]) == []


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.unnamed: list[str] = []
        self._label = 0
        self._labelled: set[str] = set()
        self.feed(TEXTS[INDEX])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids += [found["id"]] if "id" in found else []
        self.addresses += [found[name] for name in ("href", "src") if name in found]
        self._label += tag == "label"
        if tag == "label" and "for" in found:
            self._labelled.add(found["for"])
        if tag in ("input", "select", "textarea") and not self._label and found.get("id") not in self._labelled:
            self.unnamed.append(found.get("id", tag))

    def handle_endtag(self, tag: str) -> None:
        self._label -= tag == "label"


def test_ids_labels_and_links_of_the_page_are_consistent() -> None:
    page = Reader()
    assert len(page.ids) == len(set(page.ids)), "duplicate ids"
    assert page.unnamed == [], "fields without labels"
    inside = {address for address in page.addresses if not address.startswith("#")}
    assert inside <= set(PAGES)
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    wanted = {found for name in SCRIPTS for found in re.findall(r"find\(\"#([\w-]+)", TEXTS[name])}
    assert wanted - set(page.ids) == set(), "scripts use ids that do not exist"


def test_the_page_offers_the_parameters_of_the_api() -> None:
    block = re.search(r"<select id=\"endpoint\">(.*?)</select>", TEXTS[INDEX], re.DOTALL)
    assert block is not None and sorted(re.findall(r"<option>(.*?)</option>", block[1])) == sorted(ENDPOINTS)
    numbers = re.search(r"const NUMBERS = \[(.*?)\]", TEXTS["chat.js"], re.DOTALL)
    assert numbers is not None
    names = re.findall(r"\"(\w+)\"", numbers[1])
    assert set(names) <= set(ChatCall.__struct_fields__) and set(names) <= set(Reader().ids)


def test_the_pictures_of_the_documentation_exist_and_are_small() -> None:
    page = (DOCS / "console.md").read_text()
    shown = set(re.findall(r"!\[[^\]]+\]\((console-[a-z]+-(?:light|dark)\.png)\)", page))
    assert {name.split("-")[1] for name in shown} == {"chat", "phone", "live", "requests", "batches"}
    taken = {file.name: file.stat().st_size for file in DOCS.glob("console-*.png")}
    assert shown == taken.keys() and max(taken.values()) < 150_000
