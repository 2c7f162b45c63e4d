"""What `make` installs and prints, with a Python that only pretends to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRETENDER = f"""#!/bin/sh
# Runs short programs; venv and pip only record their arguments and warn as pip does.
case "$*" in
*"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*"-m pip"*)
    mkdir pip-runs || {{ echo "ERROR: two pips change one environment at a time" >&2; exit 1; }}
    trap 'rmdir pip-runs' EXIT
    echo "$*" >> asked
    sleep 0.05
    echo "WARNING: The directory is not owned by the current user" >&2
    case "$*" in *--requirement*) while read -r line; do echo "  $line" >> asked; done < "${{*##* }}" ;; esac
    case "$*" in *"$BROKEN"*) echo "ERROR: the reason" >&2; exit 1 ;; esac
    case "$*" in *--force-reinstall*) touch .venv/bin/bankfull && chmod +x .venv/bin/bankfull ;; esac ;;
*build_editable*)
    echo "$*" >> asked
    case "$*" in *"$BROKEN"*) echo "WARNING: The directory"; echo "ERROR: the reason" >&2; exit 1 ;; esac ;;
*select_isa*) echo "install: ready" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bankfull").mkdir()
    shutil.copy(ROOT / "bankfull" / "__init__.py", tmp_path / "bankfull")
    (tmp_path / "python").write_text(PRETENDER)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(folder: Path, *targets: str, broken: str = "no package") -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", f"PYTHON={folder / 'python'}", *targets]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "BROKEN": broken}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_install_prints_a_line_for_each_step_and_takes_only_what_running_needs(folder: Path) -> None:
    done = make(folder, "install")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and all(line.startswith("install: ") for line in lines)
    found = asked(folder)
    torch = [line for line in found if line.endswith("install --no-compile torch==2.13.0")]
    assert len(torch) == 1, "a step of its own, before anything that needs it"
    assert found.index(torch[0]) < found.index("  safetensors")
    assert sum(line.endswith("--force-reinstall ./heads") for line in found) == 1
    assert "  starlette" in found and not {"  pytest", "  transformers", "  ruff"} & set(found)


def test_nothing_is_done_again_when_nothing_has_changed(folder: Path) -> None:
    make(folder, "tools")
    before = asked(folder)
    again = make(folder, "tools")
    assert (again.returncode, again.stdout, asked(folder)) == (0, "", before)
    (folder / "pyproject.toml").write_text((folder / "pyproject.toml").read_text() + "\n")
    assert "compiling the kernels" in make(folder, "install").stdout


def test_tests_and_checks_get_what_they_need(folder: Path) -> None:
    assert "(instruction sets: all)" in make(folder, "tools").stdout
    assert {"  pytest", "  transformers", "  ruff", "  mypy>=2.4"} <= set(asked(folder))
    assert make(folder, "install").stdout == "", "what runs is among it"
    for target in (
        "lint",
        "test",
        "test-full",
        "test-clients",
        "test-console",
        "test-docs",
        "soak",
        "test-sanitize",
        "bench",
    ):
        plan = subprocess.run(["make", "-n", target], cwd=folder, capture_output=True, text=True, check=True).stdout
        assert ".stamps/tools.txt" in plan, target
    plan = subprocess.run(
        ["make", "-n", "demo", "serve"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    assert ".stamps/tools.txt" not in plan and "install.txt" in plan


@pytest.mark.parametrize("broken", ["torch==2.13.0", "nanobind", "build_editable", "--force-reinstall", "install.txt"])
def test_a_failed_step_prints_its_whole_output(folder: Path, broken: str) -> None:
    done = make(folder, "install", broken=broken)
    assert done.returncode != 0
    assert "WARNING: The directory" in done.stderr and "ERROR: the reason" in done.stderr
    assert "this step failed" in done.stderr
    assert not (folder / ".stamps" / "install").exists()
    assert make(folder, "install").returncode == 0, "a second attempt works"
