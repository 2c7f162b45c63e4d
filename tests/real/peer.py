"""llama.cpp in a process of its own environment: one JSON object a line, in and out. It imports nothing of ours.

First line in: the path of a model, the size of the context, threads. Then requests: token ids, a number of tokens to
continue with, and stop strings. Out: the greedy tokens, their text, and for each the lead of its logit over the next.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llama_cpp
import numpy as np


def answer(llm: llama_cpp.Llama, asked: dict[str, Any]) -> dict[str, Any]:
    llm.reset()
    llm.eval(asked["tokens"])
    tokens: list[int] = []
    leads: list[float] = []
    text, ended = "", False
    while len(tokens) < asked["count"] and not ended:
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),))
        second, best = (int(at) for at in np.argpartition(logits, -2)[-2:])
        if logits[second] > logits[best]:
            second, best = best, second
        leads.append(float(logits[best] - logits[second]))
        tokens.append(best)
        ended = bool(llama_cpp.llama_vocab_is_eog(llm._model.vocab, best))
        if not ended:
            text = llm.detokenize(tokens, special=False).decode(errors="ignore")
            ended = any(stop in text for stop in asked.get("stop", ()))
            llm.eval([best])
    for stop in asked.get("stop", ()):
        text = text.partition(stop)[0]
    return {"tokens": tokens, "leads": leads, "text": text}


def main() -> None:
    how = json.loads(sys.stdin.readline())
    threads = how["threads"]
    llm = llama_cpp.Llama(how["model"], n_ctx=how["context"], n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in sys.stdin:
        print(json.dumps(answer(llm, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
