"""llama.cpp as a process of its own environment: reads one JSON object, prints another. It imports nothing of ours.

In: the path of a model, a text or its token ids, and the number of tokens to continue with. Out: the ids of the prompt,
the greedy continuation, and a file with the logits behind each token of the prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llama_cpp
import numpy as np


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    llm = llama_cpp.Llama(
        asked["model"],
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    text = asked.get("text")
    tokens = asked["tokens"] if text is None else llm.tokenize(text.encode(), add_bos=False, special=True)
    llm.eval(tokens)
    np.save(asked["logits"], llm.scores[: len(tokens)])
    found: list[int] = []
    while len(found) < asked["count"]:
        best = int(np.argmax(llm.scores[llm.n_tokens - 1]))
        found.append(best)
        llm.eval([best])
    return {"tokens": list(tokens), "found": found}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
