"""llama.cpp, if `make test-llamacpp` has installed it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.cpu_peers.llamacpp_package import installed

PEER = Path(__file__).with_name("peer.py")


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    """The prompt."""
    logits: Tensor
    """Behind each token of the prompt."""
    found: list[int]
    """The tokens that continue it."""


Ask = Callable[[Path, str | Sequence[int], int], Answer]
"""What llama.cpp makes of a file, a prompt and a number of tokens to continue with."""


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    python = installed()
    if python is None:
        pytest.skip("llama.cpp is not installed: make test-llamacpp compiles it once")

    def answer(model: Path, prompt: str | Sequence[int], count: int = 0) -> Answer:
        kept = tmp_path / "logits.npy"
        what = {"text": prompt} if isinstance(prompt, str) else {"tokens": list(prompt)}
        asked = {"model": str(model), "count": count, "logits": str(kept), **what}
        done = subprocess.run(
            [str(python), str(PEER)], input=json.dumps(asked), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = json.loads(done.stdout)
        return Answer(said["tokens"], torch.from_numpy(np.load(kept)), said["found"])

    return answer
