"""A wheel holds all that the package needs and nothing of the machine that built it; it works without the sources."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from bankfull.ops.native import extension
from tests.tiny import speaking_folder

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "bankfull", "csrc")
PURE = {"wheel.cmake": "false", "wheel.py-api": "py3", "wheel.platlib": "false"}
"""What pyproject.toml says for a machine without a compiler."""
NEEDED = ("pip", "scikit_build_core", "nanobind")
ASKED = """
import json, sys
import bankfull
from bankfull import LLM, SamplingParams
from bankfull.ops import native
from bankfull.ops.native import extension
llm = LLM(sys.argv[1], memory="8MiB")
tokens = llm.generate("The river", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0].outputs[0].token_ids
print(json.dumps({
    "package": bankfull.__file__, "path": sys.path, "tokens": list(tokens), "status": native.status(),
    "sets": [] if extension.kernels is None else list(extension.kernels.isas()),
}))
"""

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"wheels are built by {', '.join(NEEDED)}"
)


@dataclass(frozen=True)
class Built:
    wheel: Path
    build: Path

    @property
    def names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def read(self, ending: str) -> bytes:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if re.search(ending, name))
            return archive.read(name)


def built(folder: Path, settings: dict[str, str], sources: tuple[str, ...] = SOURCES) -> Built:
    """`pip wheel` of a copy of the sources, or of one folder of them, with this environment's tools: nothing is
    fetched."""
    source, build = folder / "source", folder / "build"
    source.mkdir()
    for name in sources:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    told = {**settings, "build-dir": str(build), "cmake.define.CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    options = [word for name, value in told.items() for word in ("-C", f"{name}={value}")]
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--disable-pip-version-check",
            "--wheel-dir",
            str(folder),
            *options,
            str(source if sources == SOURCES else source / sources[0]),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path, "BANKFULL_REQUIRE_NATIVE": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    shutil.rmtree(source)  # whatever works from here on works without it
    return Built(wheel, build)


def clean_environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel, and with this one's packages behind it; the editable package is not among them,
    because what hooks it in is a .pth file, which counts only in an environment's own folder."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--disable-pip-version-check",
            str(wheel),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "behind.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    return site


def outside(folder: Path, *command: str) -> str:
    ours = ("PYTHON", "BANKFULL", "VIRTUAL")
    alone = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    program = [str(folder / "bin" / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=folder, env=alone, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_it_runs(environment: Path, sets: list[str]) -> None:
    answer = json.loads(outside(environment, "python", "-c", ASKED, str(speaking_folder())))
    assert Path(answer["package"]).is_relative_to(environment) and str(ROOT) not in answer["path"]
    assert len(answer["tokens"]) == 1 and answer["sets"] == sets
    assert (answer["status"] is None) == bool(sets)
    from bankfull import __version__

    assert __version__ in outside(environment, "bankfull", "--version")


def check_contents(found: Built) -> None:
    package = ROOT / "bankfull"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    assert {"bankfull/serve/console/static/index.html", "bankfull/limits/machine/catalogue.toml"} <= wanted
    names = {name for name in found.names if ".dist-info/" not in name and not name.endswith(".so")}
    assert names == wanted, "the wheel holds the package's files, all of them and no others"


def test_heads_are_a_wheel_of_their_own_that_the_engine_finds(tmp_path: Path) -> None:
    source = ROOT / "heads"
    found = built(tmp_path, {}, ("heads",))
    names = {name for name in found.names if ".dist-info/" not in name}
    assert names == {
        path.relative_to(source).as_posix()
        for path in source.glob("*/**/*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert sum(name.endswith("config.json") for name in names) == 2
    ask = "from bankfull.weights.bundled import SHAPE, bundled; print(bundled('eagle', SHAPE, 'it'))"
    environment = tmp_path / "environment"
    site = clean_environment(environment, found.wheel)
    (site / "engine.pth").write_text(str(ROOT))
    place = Path(outside(environment, "python", "-c", ask).strip())
    assert place.is_relative_to(site) and (place / "model.safetensors").is_file()


@pytest.mark.full
def test_a_wheel_works_without_the_sources(tmp_path: Path) -> None:
    """With the native module that this environment has, so that nothing is compiled: the full runs do that."""
    found = built(tmp_path, PURE)
    assert found.wheel.name.endswith("-py3-none-any.whl")
    check_contents(found)
    environment = tmp_path / "environment"
    site = clean_environment(environment, found.wheel)
    sets: list[str] = []
    if extension.kernels is not None:
        shutil.copy(extension.kernels.__file__, site / "bankfull")
        sets = list(extension.kernels.isas())
    check_it_runs(environment, sets)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(extension.kernels is None, reason="there is no compiler here, it seems: the kernels are not built")
def test_a_native_wheel_is_portable_and_works_without_the_sources(tmp_path: Path) -> None:
    found = built(tmp_path, {})
    version = sys.version_info
    stable = version >= (3, 12)  # nanobind's stable ABI begins there
    abi = "cp312-abi3" if stable else f"cp{version.major}{version.minor}-cp{version.major}{version.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert found.wheel.name.endswith(f"-{abi}-{platform}.whl")
    assert f"Tag: {abi}-{platform}" in found.read(r"\.dist-info/WHEEL$").decode()
    check_contents(found)
    ending = r"_native\.abi3\.so$" if stable else rf"_native\.cpython-{version.major}{version.minor}-[\w-]+\.so$"
    module = found.read(ending)
    for place in (tmp_path, ROOT, Path.home()):
        assert str(place).encode() + b"/" not in module, f"the module names {place} of the machine that built it"
    commands = (found.build / "compile_commands.json").read_text()
    assert "csrc/kernels.cpp" in commands and not re.search(r"-m(arch|cpu|tune)=native", commands)
    environment = tmp_path / "environment"
    clean_environment(environment, found.wheel)
    assert extension.kernels is not None
    check_it_runs(environment, list(extension.kernels.isas()))
