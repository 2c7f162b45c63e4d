"""Commands to a running server: `bankfull cluster` reaches it over a Unix socket that only its own user can open.

Each server of this user writes a small file with the path of its socket into the data directory, so that the command
finds it. Nothing of this can be reached over the network.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from bankfull import paths
from bankfull.cluster.messages import MOST_BYTES
from bankfull.errors import BankfullError, ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.scratch import ScratchFolder, remove_abandoned

ANSWER_SECONDS = 10.0
"""Time-out of a command."""


class Controlled(Protocol):
    def status(self) -> dict[str, Any]: ...

    def resize(self, bounds: ReplicaRange) -> None: ...

    def retire(self, name: str) -> None: ...

    def update(self, model: str | None, grace: float | None) -> None: ...


class AdminSocket:
    """The server's end."""

    def __init__(self, cluster: Controlled) -> None:
        self._cluster = cluster
        self._server: asyncio.Server | None = None
        self._folder: ScratchFolder | None = None
        self._note: Path | None = None

    async def start(self) -> None:
        self._folder = ScratchFolder("cluster")
        place = self._folder.path / "s"
        self._server = await asyncio.start_unix_server(self._serve, place, limit=MOST_BYTES)
        notes = notes_folder()
        notes.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._note = notes / f"{os.getpid()}.json"
        self._note.write_text(json.dumps({"pid": os.getpid(), "socket": str(place)}))

    def hide(self) -> None:
        """Commands go to the server that takes over."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.hide()
        if self._folder is not None:
            self._folder.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                command = json.loads(await reader.readline())
                writer.write(json.dumps(self._answer(command)).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, TimeoutError):
            pass  # not one of our commands
        finally:
            writer.close()

    def _answer(self, command: Any) -> dict[str, Any]:
        try:
            match command:
                case {"do": "status"}:
                    pass
                case {"do": "scale", "replicas": str(text)}:
                    self._cluster.resize(ReplicaRange.parse(text))
                case {"do": "drain", "name": str(name)}:
                    self._cluster.retire(name)
                case {"do": "update", "model": str() | None as model, "grace": int() | float() | None as grace}:
                    self._cluster.update(model, grace)
                case {"do": "down"}:
                    os.kill(os.getpid(), signal.SIGTERM)
                case _:
                    raise ConfigError("The server does not know this command: its version of bankfull differs.")
        except BankfullError as error:
            return {"error": str(error)}
        return {"pid": os.getpid(), **self._cluster.status()}


def notes_folder() -> Path:
    return paths.data_dir() / "cluster"


def ask(command: dict[str, Any], pid: int | None = None) -> dict[str, Any]:
    """The answer of the server, after one of its errors was raised. `pid`: its process, if several run."""
    notes = _running() if pid is None else {p: s for p, s in _running().items() if p == pid}
    if not notes:
        which = "No server with replicas" if pid is None else f"No server with replicas and the process id {pid}"
        raise ConfigError(f"{which} runs for this user on this machine: start one with `bankfull serve --replicas 2`.")
    if len(notes) > 1:
        raise ConfigError(f"Several servers run: choose one with --pid {', --pid '.join(map(str, sorted(notes)))}.")
    (where,) = notes.values()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(where)
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline(MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The server {next(iter(notes))} does not answer: {error}.") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    assert isinstance(answer, dict)
    return answer


def alive(pid: int) -> bool:
    """Whether the process runs. One that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):  # no such table on this system
        return True


def _running() -> dict[int, str]:
    """Process ids and sockets; notes and folders of servers that were killed are removed."""
    remove_abandoned()
    sockets = {}
    for note in sorted(notes_folder().glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(note.read_text())
            if alive(int(said["pid"])) and Path(said["socket"]).exists():
                sockets[int(said["pid"])] = str(said["socket"])
            else:
                note.unlink(missing_ok=True)
    return sockets
