"""llama.cpp, through the low-level bindings of llama-cpp-python: all requests of a turn are one batch per step.

    python -m benchmarks.cpu_peers.engine_llamacpp --quantize SOURCE TARGET Q4_0     stores a file in another type
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from benchmarks.cpu_peers.protocol import Prompts, serve

CONTEXT = 4096
BATCH = 2048
ATTENTION_PLAIN, ATTENTION_AUTO = 0, -1


class LlamaCpp:
    def load(self, model: str, threads: int) -> str:
        import llama_cpp as api  # type: ignore[import-not-found]
        import numpy

        self._api: Any = api
        self._numpy: Any = numpy
        self._threads = threads
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._context, self._shape = None, (0, 0)
        self._open(1, CONTEXT)
        return f"llama-cpp-python {api.__version__}"

    def generate(self, prompts: Prompts, new: int) -> list[list[int]]:
        several = len(prompts)
        longest = max(map(len, prompts)) + new
        self._open(several, CONTEXT if several == 1 and longest <= CONTEXT else several * longest)
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        made = [[token] for token in self._prefill(prompts)]
        for step in range(new - 1):
            for sequence, prompt in enumerate(prompts):
                self._put(sequence, made[sequence][-1], len(prompt) + step, sequence, wanted=True)
            for sequence, token in enumerate(self._run(several, range(several))):
                made[sequence].append(token)
        return made

    def _open(self, sequences: int, tokens: int) -> None:
        if self._shape == (sequences, tokens):
            return
        api = self._api
        if self._context:
            api.llama_free(self._context)
        how = api.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch, how.n_seq_max = tokens, BATCH, 512, sequences
        how.n_threads = how.n_threads_batch = self._threads
        # Its flash attention makes a batch no faster than one stream after another; plain attention doubles that.
        how.flash_attn_type = ATTENTION_AUTO if sequences == 1 else ATTENTION_PLAIN
        self._context, self._shape = api.llama_init_from_model(self._model, how), (sequences, tokens)
        if not self._context:
            raise ValueError(f"llama.cpp has no context of {tokens} tokens for {sequences} sequences")

    def _prefill(self, prompts: Prompts) -> list[int]:
        """The first token of each; prompts are packed into batches, long ones cut."""
        first = [0] * len(prompts)
        filled, ends = 0, list[tuple[int, int]]()

        def run() -> None:
            nonlocal filled, ends
            for (sequence, _), token in zip(ends, self._run(filled, [at for _, at in ends]), strict=True):
                first[sequence] = token
            filled, ends = 0, []

        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                if filled == BATCH:
                    run()
                last = position == len(prompt) - 1
                self._put(filled, token, position, sequence, wanted=last)
                if last:
                    ends.append((sequence, filled))
                filled += 1
        run()
        return first

    def _put(self, at: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch = self._batch
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, int(wanted)
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence

    def _run(self, tokens: int, wanted: Any) -> list[int]:
        """Run the batch; the likeliest token behind each wanted one."""
        self._batch.n_tokens = tokens
        if code := self._api.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        scores = (self._api.llama_get_logits_ith(self._context, at) for at in wanted)
        return [int(self._numpy.ctypeslib.as_array(row, shape=(self._vocab,)).argmax()) for row in scores]


def quantize(source: str, target: str, kind: str) -> None:
    import llama_cpp as api

    how = api.llama_model_quantize_default_params()
    how.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    how.allow_requantize = True
    if code := api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(how)):
        sys.exit(f"llama_model_quantize failed with {code}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--quantize"]:
        quantize(*sys.argv[2:5])
    else:
        serve(LlamaCpp())
