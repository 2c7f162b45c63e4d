"""`bankfull explain`: the time of each phase of a request, next to the machine's limit, and what would reduce it."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import EngineOptions, Json

if TYPE_CHECKING:
    from bankfull.limits.explain.explain import Explanation
    from bankfull.llm import LLM

SHORTEST_PROMPT = 128


def explain(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; random tokens if omitted.", show_default=False)
    ] = None,
    *,
    engine: EngineOptions,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens in a random prompt.")] = SHORTEST_PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    streams: Annotated[
        int, typer.Option(min=1, max=4096, help="Concurrent requests: this one, and others with random prompts.")
    ] = 1,
    saved: Annotated[
        str | None,
        typer.Option(
            help='Explain a saved API response, requested with "explain": true; - is stdin.',
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Send the request to a server: http://127.0.0.1:8000.", show_default=False),
    ] = None,
    key: Annotated[str | None, typer.Option(help="The server's API key.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Show why a request was slow: queue, prefill, decode, batch and host, each next to its limit.

    The request runs in this process or on a running server. Each piece of advice has a number: the predicted saving, as
    the difference of two runs of the cost model.
    """
    from bankfull.errors import ConfigError

    if saved is not None and url is not None:
        raise ConfigError("--saved and --url exclude each other; give one of the two.")
    if saved is not None:
        explanations = {"the request": _saved(saved)}
    elif url is not None:
        explanations = {"the request": _asked(url, key, prompt, max_tokens)}
    else:
        explanations = _ran(engine, prompt, prompt_len, max_tokens, streams)
    if json:
        print(json_text.dumps({name.removeprefix("the "): one.as_json() for name, one in explanations.items()}))
        return
    from bankfull.cli.terminal import print_table
    from bankfull.limits.explain.show import explanation_table, facts

    for name, one in explanations.items():
        print_table(explanation_table(one, name))
        if said := facts(one):
            print(said)
        print(one.summary)


def _ran(
    engine: EngineOptions, prompt: str | None, prompt_len: int, max_tokens: int, streams: int
) -> dict[str, Explanation]:
    llm = engine.load()
    from bankfull.limits.explain.advice import adviser_of
    from bankfull.limits.explain.explain import explain as explained
    from bankfull.limits.explain.recorder import RequestRecorder
    from bankfull.limits.explain.run_story import run_followed
    from bankfull.limits.meter.step_limit import step_limit_of

    step_limit = step_limit_of(llm, measure=True)
    adviser = None if step_limit is None else adviser_of(llm, step_limit)
    recorder = RequestRecorder(llm.loaded.frontend.engine, step_limit)
    first, run = run_followed(llm, recorder, _prompts(llm, prompt, prompt_len, streams), max_tokens)
    explanations = {"the request": explained(first, step_limit, adviser)}
    if streams > 1:
        explanations["the run"] = explained(run, step_limit, adviser)
    return explanations


def _prompts(llm: LLM, prompt: str | None, length: int, streams: int) -> list[Any]:
    """The prompt to explain comes first; the others share no prefix with it."""
    import random

    front = llm.loaded.frontend
    first: list[int] | None = None
    if prompt is not None:
        templated = llm.loaded.template is not None
        first = front.encode_chat([{"role": "user", "content": prompt}]) if templated else front.encode(prompt)[1]
        length = len(first)
    drawn = [random.Random(number).choices(range(front.vocab), k=length) for number in range(streams)]
    return drawn if first is None else [first, *drawn[1:]]


def _saved(path: str) -> Explanation:
    from pathlib import Path

    from bankfull.cli.terminal import read_input
    from bankfull.errors import ConfigError

    try:
        text = read_input() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return _in_answer(text, path)


def _in_answer(text: str, where: str) -> Explanation:
    import msgspec

    from bankfull.errors import ConfigError
    from bankfull.limits.explain.explain import Explanation

    try:
        body = json_text.loads(text)
        account = body.get("explain", body.get("request", body)) if isinstance(body, dict) else body
        # A completions response has one explanation for each prompt.
        return msgspec.convert(account[0] if isinstance(account, list) else account, Explanation)
    except (ValueError, IndexError, msgspec.ValidationError, RecursionError):
        raise ConfigError(
            f'{where} holds no explanation of a request: send "explain": true with the request, or save what '
            "`bankfull explain --json` prints."
        ) from None


def _asked(url: str, key: str | None, prompt: str | None, max_tokens: int) -> Explanation:
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    from bankfull.errors import ConfigError, RequestError

    if prompt is None:
        raise RequestError("A server needs a prompt; give it after `bankfull explain`.")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url[:80]!r} is not the address of a server; it must begin with http:// or https://.")
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "explain": True}
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    place = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    try:
        with urlopen(Request(place, json_text.dumps(body).encode(), headers)) as answer:
            text: str = answer.read().decode()
    except HTTPError as error:
        raise RequestError(f"The server refused the request ({error.code}): {_problem(error.read())}") from None
    except (URLError, OSError, ValueError) as error:
        raise RequestError(f"{url} does not answer: {getattr(error, 'reason', error)}.") from None
    return _in_answer(text, url)


def _problem(body: bytes) -> str:
    try:
        return str(json_text.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
