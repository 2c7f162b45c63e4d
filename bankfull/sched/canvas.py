"""Diffusion models: which positions of a sequence a step computes, and whose state stays.

A sequence is its known tokens and a canvas of mask tokens after them. Each step predicts the masked tokens of one block
at the beginning of the canvas and fixes some of them; when all are fixed, the block's tokens become known.

- A block-causal model sees blocks up to its own. State of a whole block of known tokens is final: it is computed once,
  in the step that denoises the next block, and kept. A block that holds known and masked tokens is computed again in
  each step.
- A model that sees the whole sequence has no final state. Each step computes all tokens (exact), or keeps the state of
  known tokens although later tokens change (lossy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bankfull.errors import RequestError
from bankfull.sched.sequence import Sequence
from bankfull.sched.step_builder import StepBuilder
from bankfull.state.manager import StateManager
from bankfull.state.sequence_state import Reserved
from bankfull.types import CanvasShape, Request, Work


@dataclass(frozen=True, slots=True)
class Canvas:
    shape: CanvasShape
    max_len: int
    """Tokens of the longest sequence."""

    def block_end(self, known: int, prompt_len: int) -> int:
        """The position after the block that is denoised next. Blocks of a block-causal model are aligned to position 0,
        others to the end of the prompt."""
        block = self.shape.block
        begin = prompt_len if self.shape.whole else 0
        return begin + ((known - begin) // block + 1) * block

    def canvas_end(self, known: int, prompt_len: int, limit: int) -> int:
        """The position after the last mask token that the next step computes."""
        if self.shape.whole:
            length = self.shape.length
            return min(prompt_len + ((known - prompt_len) // length + 1) * length, limit)
        return min((known // self.shape.sight + 1) * self.shape.sight, self.max_len)

    def border(self, known: int) -> int:
        """Leading tokens whose state is final."""
        return 0 if self.shape.whole else known // self.shape.sight * self.shape.sight

    def end(self, seq: Sequence) -> int:
        return self.canvas_end(len(seq.tokens), seq.prompt_len, seq.request.limit)

    def decodes(self, seq: Sequence) -> bool:
        """Whether no more than one block of known tokens waits to be computed before the canvas."""
        return self.shape.whole or self.border(len(seq.tokens)) - seq.start <= self.shape.sight

    def least(self, seq: Sequence) -> int:
        """Tokens of the smallest step that takes the sequence further."""
        waiting = self.border(len(seq.tokens)) - seq.start
        return self.shape.sight if waiting >= self.shape.sight else self.end(seq) - seq.start

    def serve(
        self, seq: Sequence, step: StepBuilder, insist: Callable[[Sequence, int, StepBuilder], Reserved | None]
    ) -> bool:
        """Give a sequence a step; False when it could use one but memory is short. `insist` reserves its places up to a
        token. Its next step depends on the result of the one in flight."""
        work = None if seq.flying else self.work(seq, step.budget)
        if work is None:
            return True
        if (reserved := insist(seq, seq.start + work.count + work.drafts, step)) is None:
            return False
        step.prompts |= not seq.batch and seq.start < self.border(seq.prompt_len)
        step.give(seq, work, reserved)
        return True

    def work(self, seq: Sequence, budget: int) -> Work | None:
        """The sequence's next step of at most `budget` tokens; None if it does not fit."""
        shape, known, start = self.shape, len(seq.tokens), seq.start
        end, border = self.end(seq), self.border(known)
        if end - start > budget:
            # The prompt of a block-causal model may run in chunks of whole blocks.
            upto = 0 if shape.whole else min(border, (start + budget) // shape.sight * shape.sight)
            return Work(seq.row, start, upto - start) if upto > start else None
        # A prediction from the token before it needs that token in the step.
        kept = max(0, (known if shape.whole else border) - shape.shifted - start)
        if shape.whole and not shape.cached:
            kept = 0
        elif shape.refresh and (seq.denoised + 1) % shape.refresh == 0:
            kept = -start
        count, block = known - start, min(self.block_end(known, seq.prompt_len), end) - known
        first, redone = count - shape.shifted, count - kept
        return Work(seq.row, start, count, end - known, True, redone=redone, block=block, first=first)

    def check(self, request: Request, step_tokens: int, state: StateManager) -> None:
        """Refuses a request that can never run."""
        if not request.generates:
            raise RequestError(
                "A diffusion model only generates: embeddings, scores and max_tokens=0 need a model that predicts the "
                "next token."
            )
        longest = request.limit if self.shape.whole else self.canvas_end(request.limit - 1, 0, request.limit)
        if self.shape.whole and longest > step_tokens:
            raise RequestError(
                f"The prompt and max_tokens have {longest} tokens, and this model computes all of them in each step of "
                f"at most {step_tokens}; lower max_tokens, shorten the prompt, or raise step_tokens."
            )
        if (need := state.frames_for(longest, step_tokens)) > state.pages.size:
            raise RequestError(
                f"The last block ends after {longest} tokens, which need {need} pages of state, but the pool has "
                f"{state.pages.size}; lower max_tokens, shorten the prompt, or give the pool more memory."
            )
