"""What listens is what docs/security.md says, in each arrangement that runs on one machine without Ray (with Ray:
`test_local.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.kit import serving
from tests.cluster.listening import documented, listening, per_process

ARRANGEMENTS = [
    pytest.param((), (), {"server": {1}}, id="one engine", marks=pytest.mark.full),
    pytest.param(("--replicas", "2"), (), {"server": {1}}, id="two replicas", marks=pytest.mark.full),
    pytest.param(
        ("--parallel", "pp=2"),
        ("--parallel",),
        {"server": {1}, "engine": {1}, "rank": {1}},
        id="two stages",
        marks=pytest.mark.full,
    ),
    pytest.param(
        ("--parallel", "tp=2"),
        ("--parallel",),
        {"server": {1}, "engine": {1}, "rank": {1}},
        id="two tensor ranks",
        marks=pytest.mark.full,
    ),
    pytest.param(
        ("--separate", "prefill=1,decode=1"), (), {"server": {1}}, id="apart by memory", marks=pytest.mark.full
    ),
    pytest.param(
        ("--separate", "prefill=1,decode=1,link=socket"),
        ("--separate link=socket",),
        {"server": {1}, "engine": {1}},
        id="apart by sockets",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("options", "told", "expected"), ARRANGEMENTS)
def test_the_ports_of_all_processes_are_those_of_the_page(
    options: tuple[str, ...], told: tuple[str, ...], expected: dict[str, set[int]], tmp_path: Path
) -> None:
    with serving(tmp_path / "data", *options, without_ray=True) as server:
        assert server.answer(3)
        found = listening(server.mark)
        assert per_process(found) == expected
        assert set(expected) == documented(*told), "the table in docs/security.md"
        assert all(one.loopback for one in found)
        if "--parallel" in options:
            assert [one.process for one in found if not one.deaf] == ["server"]
            assert server.answer(3), "ranks go on"
        shown = [path.read_bytes() for one in found for path in Path(f"/proc/{one.pid}").glob("environ")]
        assert shown and not any(b"TOKEN=" in entry for text in shown for entry in text.split(b"\0"))
