"""This engine with default options."""

from __future__ import annotations

from typing import Any

from benchmarks.cpu_peers.protocol import Prompts, serve


class Bankfull:
    def load(self, model: str, threads: int) -> str:
        import bankfull  # before torch: it sets environment variables that torch reads on import
        from bankfull.ops import native

        native.set_threads(threads)
        self._llm: Any = bankfull.LLM(model, speculative="off")
        return f"bankfull {bankfull.__version__}"

    def generate(self, prompts: Prompts, new: int) -> list[list[int]]:
        from bankfull import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        return [result.outputs[0].token_ids for result in self._llm.generate(prompts, params)]


if __name__ == "__main__":
    serve(Bankfull())
