"""An interactive conversation: messages, slash commands and answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bankfull.cli.answer import StepLog, answer, cut_off
from bankfull.cli.sampling import params_from
from bankfull.cli.speed import Limit, speed_of
from bankfull.cli.terminal import say, write_text
from bankfull.errors import BankfullError, RequestError
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams

HELP = """\
/help                  this list
/reset                 clear the conversation; the system message stays
/system [TEXT]         set the system message; without TEXT, remove it
/params [NAME=VALUE]   show or change sampling parameters: /params temperature=0.7 max_tokens=100
/save FILE             save the conversation to a file
/load FILE             continue a saved conversation
/quit                  quit (also Ctrl-D)
A line that ends with \\ continues on the next line. A message that begins with / is written with // instead."""
MORE = "/params max_tokens=N allows more, max_tokens=none fills the context"
LARGEST_FILE = 64 << 20
ROLES = ("system", "user", "assistant")

Message = dict[str, Any]


class ChatSession:
    def __init__(self, llm: LLM, model: str, params: SamplingParams, limit: Limit | None, system: str | None) -> None:
        self._llm, self._model, self._params, self._limit = llm, model, params, limit
        self._watch = StepLog(llm)
        self._system = system
        self._messages: list[Message] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: say(HELP),
            "reset": self._reset,
            "system": self._set_system,
            "params": self._change_params,
            "save": self._save,
            "load": self._load,
        }

    def hold(self, lines: Iterator[str]) -> int:
        """Run until the lines end. The exit code is 2 if one of them was refused."""
        code = 0
        for line in lines:
            text = line.strip()
            if text == "/quit":
                break
            try:
                self._take(text, line)
            except BankfullError as error:
                say(f"bankfull: {error}")
                code = 2
        return code

    def _take(self, text: str, line: str) -> None:
        if not text:
            return
        if text.startswith("/") and not text.startswith("//"):
            name, _, rest = text[1:].partition(" ")
            if name not in self._commands:
                raise RequestError(f"There is no command /{name[:40]}; /help lists the commands.")
            self._commands[name](rest.strip())
            return
        self._answer(line[line.index("/") + 1 :] if text.startswith("//") else line)

    # -- messages

    def _answer(self, text: str) -> None:
        """A message that cannot be answered is dropped, so that the conversation can continue."""
        said: Message = {"role": "user", "content": text}
        ids = self._llm.loaded.frontend.encode_chat([*self._opening(), *self._messages, said])
        context = self._llm.max_model_len
        if len(ids) >= context:
            raise RequestError(
                f"The conversation has {len(ids)} tokens with this message, but the context holds {context}; "
                "type /reset to clear it, or send a shorter message."
            )
        # The limit applies to each turn, and the context may have fewer tokens left.
        asked, left = self._params.max_tokens, context - len(ids)
        most = left if asked is None else min(asked, left)
        params = replace(self._params, max_tokens=most, min_tokens=min(self._params.min_tokens, most))
        answered = answer(self._llm, ids, params, self._watch, lambda delta: write_text(delta.text))
        output = answered.result.outputs[0]
        write_text("" if output.text.endswith("\n") else "\n")
        if output.error:
            raise RequestError(output.error)
        self._messages += [said, {"role": "assistant", "content": output.text}]
        if ended := cut_off(answered.result, context, more=MORE, when_full="type /reset to clear the conversation"):
            say(f"bankfull: {ended}")
        say(speed_of(answered, self._limit).line())

    def _opening(self) -> list[Message]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    # -- commands

    def _reset(self, rest: str) -> None:
        self._messages = []
        say("bankfull: conversation cleared.")

    def _set_system(self, rest: str) -> None:
        self._system = rest or None
        say(f"bankfull: system message {'set' if rest else 'removed'}; the conversation continues.")

    def _change_params(self, rest: str) -> None:
        changes = {}
        for pair in rest.split():
            name, equals, value = pair.partition("=")
            if not equals:
                raise RequestError(f"{pair!r} is not NAME=VALUE; use for example /params temperature=0.7.")
            changes[name] = None if (name, value) == ("max_tokens", "none") else _value(value)
        if changes.get("n", 1) != 1:
            raise RequestError("A conversation has one answer per turn, so n must be 1.")
        params = params_from(self._params, changes)
        self._llm.loaded.frontend.engine.check_sampling(params)
        self._params = params
        plain = SamplingParams()
        names = [name for name in plain.__slots__ if getattr(params, name) != getattr(plain, name)]
        say("bankfull: " + (", ".join(f"{name}={getattr(params, name)!r}" for name in names) or "all defaults"))

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        if path.exists():
            _read(path)  # only a saved conversation may be overwritten
        kept = {"model": self._model, "messages": [*self._opening(), *self._messages]}
        try:
            path.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None
        say(f"bankfull: {len(self._messages)} messages saved to {path}.")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        messages = _read(path)
        self._system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self._messages = messages
        say(f"bankfull: {len(messages)} messages loaded from {path}.")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _path(text: str, command: str) -> Path:
    if not text or "\0" in text:
        raise RequestError(f"{command} needs a file name, for example {command} talk.json.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _read(path: Path) -> list[Message]:
    """The messages of a file in the format of /save."""
    try:
        if path.stat().st_size > LARGEST_FILE or not path.is_file():
            raise TypeError
        content = json.loads(path.read_bytes())
        messages = content["messages"]
        if not isinstance(messages, list):
            raise TypeError
        for message in messages:
            if set(message) != {"role", "content"} or message["role"] not in ROLES:
                raise TypeError
            if not isinstance(message["content"], str):
                raise TypeError
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RequestError(f"{path} is not a conversation written by /save; choose another file.") from None
    return messages
