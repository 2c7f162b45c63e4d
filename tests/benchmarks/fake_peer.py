"""A peer that implements the protocol and computes nothing; it reports configured times.

python fake_peer.py [broken | dies | short | chatty | helped]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.cpu_peers.protocol import Prompts, serve

SECONDS_PER_TOKEN = 0.001


class FakePeer:
    def __init__(self, habit: str) -> None:
        self._habit = habit

    def load(self, model: str, threads: int) -> str:
        if self._habit == "broken":
            raise OSError(f"{model} is not to my taste")
        if self._habit == "chatty":
            print("a library prints what nobody asked for", flush=True)
            os.system("echo and so does a child")
        if self._habit == "helped":
            parent = os.getpid()
            spin = f"import os\nwhile os.getppid() == {parent}: pass"
            subprocess.Popen([sys.executable, "-c", spin], start_new_session=True)
        return f"fake 1.0 with {threads} threads"

    def generate(self, prompts: Prompts, new: int) -> list[list[int]]:
        if self._habit == "dies":
            os._exit(7)
        time.sleep(SECONDS_PER_TOKEN * new)
        return [[0] * (new - 1 if self._habit == "short" else new) for _ in prompts]


if __name__ == "__main__":
    serve(FakePeer(sys.argv[1] if len(sys.argv) > 1 else ""))
