"""`bankfull batch`: submit files of requests to a running server, and fetch the results."""

from __future__ import annotations

import json as json_text
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from bankfull.cli.options import Json
from bankfull.cli.terminal import progress, say
from bankfull.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from bankfull.cli.service import Service

ENDED = ("completed", "failed", "expired", "cancelled")
POLL_SECONDS = 1.0

batch = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Run a file of requests on a server in its idle time. Set BANKFULL_API_KEY if the server needs a key.",
)

Url = Annotated[str, typer.Option(help="Address of the server.", envvar="BANKFULL_URL")]
Id = Annotated[str, typer.Argument(help="The id of the batch: batch_...")]
LOCAL = "http://127.0.0.1:8000"


@batch.command()
def submit(
    file: Annotated[Path, typer.Argument(help="JSON lines with custom_id, method, url and body.")],
    *,
    url: Url = LOCAL,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="API path of the requests: /v1/chat/completions, ...", show_default="the url of the first line"
        ),
    ] = None,
    window: Annotated[str, typer.Option(help="Time after which the batch expires.")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended, with a progress bar.")] = False,
    json: Json = False,
) -> int:
    """Upload a file of requests, start a batch, and print its id."""
    service = _service(url)
    chosen = endpoint or _first_url(file)
    uploaded = service.upload(file)
    asked = {"input_file_id": uploaded["id"], "endpoint": chosen, "completion_window": window}
    record = service.call("POST", "/v1/batches", asked)
    if not wait:
        _show([record], json, single=True)
        return 0
    if not json:
        print(record["id"], flush=True)
    record = _waited(service, record)
    _show([record], json, single=True, details=True)
    return 0 if record["status"] == "completed" else 1


@batch.command()
def status(
    id: Annotated[str | None, typer.Argument(help="The id of the batch; lists the newest batches if omitted.")] = None,
    *,
    url: Url = LOCAL,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended, with a progress bar.")] = False,
    json: Json = False,
) -> None:
    """Show the progress of a batch."""
    service = _service(url)
    if id is None:
        if wait:
            raise ConfigError("--wait needs the id of a batch; give it as the argument.")
        _show(service.call("GET", "/v1/batches?limit=100")["data"], json)
        return
    record = _batch(service, id)
    _show([_waited(service, record) if wait else record], json, single=True, details=True)


@batch.command()
def fetch(
    id: Id,
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="File for the results; - is stdout.")],
    errors: Annotated[
        Path | None, typer.Option(help="File for the errors.", show_default="the output file with .errors appended")
    ] = None,
    url: Url = LOCAL,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended, with a progress bar.")] = False,
) -> int:
    """Download the results of a batch that has ended. The exit code is 1 if any of its requests failed."""
    service = _service(url)
    record = _batch(service, id)
    record = _waited(service, record) if wait else record
    if record["status"] not in ENDED:
        raise RequestError(f"The batch is {record['status']}; try again later, or use --wait.")
    if record["status"] == "failed":
        raise RequestError(f"The batch failed: {_first_problem(record)}")
    to_stdout = str(output) == "-"
    _download(service, record["output_file_id"], output)
    if record["error_file_id"] is None:
        return 0
    target = errors or (None if to_stdout else output.with_name(output.name + ".errors"))
    if target is not None:
        _download(service, record["error_file_id"], target)
    where = f"see {target}" if target is not None else "give a file for them with --errors"
    say(f"bankfull: {record['request_counts']['failed']} requests failed; {where}.")
    return 1


@batch.command()
def cancel(id: Id, *, url: Url = LOCAL, json: Json = False) -> None:
    """Stop a batch. The results so far can still be fetched."""
    service = _service(url)
    _show([service.call("POST", f"/v1/batches/{quote(id, safe='')}/cancel")], json, single=True)


def _service(url: str) -> Service:
    from bankfull.cli.service import Service

    return Service(url)


def _batch(service: Service, id: str) -> Any:
    return service.call("GET", f"/v1/batches/{quote(id, safe='')}")


def _waited(service: Service, found: Any) -> Any:
    while found["status"] == "validating":
        time.sleep(POLL_SECONDS / 4)
        found = _batch(service, found["id"])
    counts = found["request_counts"]
    with progress("batch", counts["total"] or None, counts["completed"] + counts["failed"]) as advance:
        while True:
            counts = found["request_counts"]
            advance(counts["completed"] + counts["failed"], f"{counts['failed']} failed")
            if found["status"] in ENDED:
                return found
            time.sleep(POLL_SECONDS)
            found = _batch(service, found["id"])


def _show(batches: list[Any], json: bool, single: bool = False, details: bool = False) -> None:
    if json:
        print(json_text.dumps(batches[0] if single else {"data": batches}))
        return
    for each in batches:
        counts = each["request_counts"]
        done = f"{counts['completed']}/{counts['total']} done, {counts['failed']} failed"
        print(f"{each['id']}  {each['status']}  {done}")
        if details and each["errors"]:
            for problem in each["errors"]["data"]:
                print("  " + _told(problem))


def _first_problem(found: Any) -> str:
    return _told(((found["errors"] or {}).get("data") or [{"message": "the server gives no reason."}])[0])


def _told(problem: Any) -> str:
    place = f"line {problem['line']}: " if problem.get("line") else ""
    return place + problem["message"]


def _first_url(file: Path) -> str:
    try:
        with file.open("rb") as lines:
            first = json_text.loads(lines.readline(1 << 24))
        return str(first["url"])
    except OSError as error:
        raise ConfigError(f"The input {file} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"The first line of {file} is not a request with a url; give --endpoint.") from None


def _download(service: Service, id: str | None, target: Path) -> None:
    """Write atomically: the file has a temporary name until it is complete."""
    if str(target) == "-":
        if id is not None:
            service.download(id, sys.stdout.buffer)
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            if id is not None:
                service.download(id, stream)
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"The output {target} cannot be written: {error.strerror or error}.") from None
    finally:
        part.unlink(missing_ok=True)
