"""Runs programs that a model has written: each in its own process and folder, with little of everything."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile

SECONDS, MEMORY, FILE = 10, 1 << 30, 1 << 20
# No sandbox: it keeps a program that a model wrote by mistake from the network, other processes and files.
GUARD = """
import sys
def refuse(event, args, kinds=("socket.", "subprocess.", "shutil.", "ctypes.", "os.system", "os.exec", "os.posix_spawn",
                               "os.fork", "os.remove", "os.rename", "os.rmdir", "os.kill")):
    if event.startswith(kinds):
        raise PermissionError(event)
sys.addaudithook(refuse)
del refuse
"""


def passes(program: str) -> bool:
    """Whether it ends by itself and without an error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-"],
                input=GUARD + program,
                text=True,
                cwd=folder,
                env={},
                timeout=3 * SECONDS,
                preexec_fn=_bounds,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _bounds() -> None:
    for what, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
