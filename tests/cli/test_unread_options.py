"""No option is accepted and does nothing: in each mode of a command, every option is read or refused."""

from __future__ import annotations

import dis
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import pytest

from bankfull.cli.bench import policies, tradeoff
from bankfull.cli.bench import serve as bench_serve
from bankfull.cli.limits import limits
from bankfull.cli.plan import plan
from bankfull.cli.quality import quality
from bankfull.cli.roofline import roofline
from tests.bench.load.kit import stamped
from tests.limits.models import LLAMA

from .conftest import Cli

Reads = set[str]
LOADS = {"LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE"}
FEW = ("--jobs", 12, "--shortest", 4, "--longest", 20, "--prompt-len", "40-50")
ONE = ("--with", "fcfs")
TRAFFIC = ("--traffic", "rate=5/s, in=30, out=10", "--requests", 20, "--devices", "cpu", "--no-calibrate", "--lossless")
MODES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "bench policies": (policies, ("bench", "policies", *FEW, *ONE)),
    "bench policies --engine": (policies, ("bench", "policies", "-m", "MODEL", "--engine", *FEW, *ONE, "--rows", 2)),
    "bench policies --replicas": (policies, ("bench", "policies", *FEW, "--replicas", 2)),
    "bench tradeoff": (tradeoff, ("bench", "tradeoff", *FEW, "--prefill-tokens", 64, "--decode-rows", 2)),
    "bench serve": (bench_serve, ("bench", "serve", "--url", "URL", "--requests", 3, "--rate", "inf")),
    "plan": (plan, ("plan", "CONFIG", *TRAFFIC)),
    "plan --simulate": (plan, ("plan", "CONFIG", *TRAFFIC, "--simulate", 2)),
    "roofline": (roofline, ("roofline", "CONFIG", "--device", "h100")),
    "roofline --parallel": (roofline, ("roofline", "CONFIG", "--device", "h100", "--parallel", "tp=2")),
    "roofline --architectures": (roofline, ("roofline", "--architectures", "--device", "h100")),
    "limits DEVICE": (limits, ("limits", "--device", "h100")),
    "limits --list": (limits, ("limits", "--list")),
    "quality": (quality, ("quality", "MODEL", "--text", "TEXT", "--window", 8)),
}


@contextmanager
def recorded(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """The options that are read inside: parameters of the command, and fields of its groups of options."""
    hints = get_type_hints(command)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    reads: Reads = set()
    for group in groups.values():
        names = {field.name for field in fields(group)}

        def read(self: Any, name: str, names: set[str] = names) -> Any:
            if name in names:
                reads.add(name)
            return object.__getattribute__(self, name)

        monkeypatch.setattr(group, "__getattribute__", read)
    code = inspect.unwrap(command).__code__
    loaded = {one.offset: str(one.argval) for one in dis.get_instructions(code) if one.opname in LOADS}

    def in_command(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti in loaded:
            reads.add(loaded[frame.f_lasti])
        return in_command

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        return in_command

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield reads
    finally:
        sys.settrace(before)


def options_of(command: Callable[..., Any]) -> set[str]:
    found: set[str] = set()
    for name, hint in get_type_hints(command).items():
        if name != "return":
            found |= {field.name for field in fields(hint)} if is_dataclass(hint) else {name}
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_option_of_a_mode_is_read_or_refused(
    mode: str, cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, words = MODES[mode]
    config, text = tmp_path / "config.json", tmp_path / "text.txt"
    config.write_text(json.dumps(LLAMA))
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    known = {"MODEL": str(model), "CONFIG": str(config), "TEXT": str(text)}
    with ExitStack() as stack:
        if "URL" in words:
            known["URL"] = stack.enter_context(stamped()).address.url
        reads = stack.enter_context(recorded(command, monkeypatch))
        done = cli(*(known.get(str(word), word) for word in words))
    assert done.code == 0, done.err
    assert options_of(command) - reads == set(), "no path of this mode reads them, not even to refuse them"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan", "CONFIG", *TRAFFIC, "--mtbf", 5), "--mtbf describes the day of --simulate"),
        (("plan", "CONFIG", *TRAFFIC, "--routing", "all"), "--routing describes the day"),
        (("plan", "CONFIG", *TRAFFIC, "--update", 12), "--update describes the day"),
        (("plan", "CONFIG", *TRAFFIC, "--node-size", 2), "--node-size describes the day"),
        (("plan", "CONFIG", *TRAFFIC, "--start-seconds", 9), "--start-seconds describes the day"),
        (("plan", "CONFIG", *TRAFFIC, "--simulate", 2, "--most", 3), "leave out --most"),
        (("roofline", "--architectures", "--link", "pcie-5"), "leave out --link"),
        (("limits", "--device", "h100", "--refresh"), "--refresh measures this machine"),
        (("limits", "--device", "h100", "--threads", 2), "--threads is for measuring"),
        (("limits", "--list", "--device", "h100"), "--device chooses one"),
        (("limits", "--list", "--svg", "a.svg"), "--svg and --png draw one device"),
        (("limits", "--catalogue", "a.toml"), "--catalogue is for --list"),
        (("bench", "serve", "--trace-speed", 2), "give --trace"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_of_another_mode_is_refused_with_the_way_out(
    words: tuple[Any, ...], says: str, cli: Cli, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    assert says in cli(*(config if word == "CONFIG" else word for word in words)).sentence
