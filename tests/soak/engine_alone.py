"""The engine without the service: for each line on stdin it runs the workload once and prints the tokens per second."""

from __future__ import annotations

import os
import sys
import time

from bankfull import LLM, SamplingParams
from bankfull.serve.engine.worker import NICENESS


def main(model: str, streams: int, tokens: int) -> None:
    os.nice(NICENESS)  # as the service does, so that other work on the machine affects both alike
    engine = LLM(model, rows=streams, prefix_cache=False)
    how = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for line in sys.stdin:
        prompts = [f"The river {line.strip()} {one}" for one in range(streams)]
        begun = time.monotonic()
        engine.generate(prompts, how)
        print(streams * tokens / (time.monotonic() - begun), flush=True)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
