"""A step's results as the host reads them: tokens, and what requests want beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from bankfull.decode.strategy import Verdict
from bankfull.sample.logits import NO_TOKEN
from bankfull.types import StepDrafts, StepResult, Work

NOTHING_LEFT = (
    "No token is left to choose from: the request's own constraints (grammar, allowed or banned tokens, logit_bias) "
    "forbid all, or the model gave no finite score; relax the constraints."
)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of a token and of the most likely tokens, under the model's own distribution."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True)
class Extra:
    """A step's part of the results that a request wants beside its tokens."""

    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Logprobs of the prompt, by the position of the token that was predicted."""
    pooled: tuple[int, Tensor] | None = None
    """Position and hidden state (last), or first position and the sum of hidden states from it on (mean)."""
    drafts: StepDrafts | None = None


def read_tokens(work: list[Work], verdict: Verdict, result: StepResult) -> None:
    sampled = verdict.sampled
    tokens = verdict.tokens.tolist()
    counts = [1] * len(tokens) if verdict.counts is None else verdict.counts.tolist()
    logprobs = None if sampled.logprobs is None else sampled.logprobs.tolist()
    top_ids = None if sampled.top_ids is None else sampled.top_ids.tolist()
    top_values = None if sampled.top_logprobs is None else sampled.top_logprobs.tolist()
    path = None if verdict.path is None else verdict.path.tolist()
    line = 0
    for j, i in enumerate(i for i, w in enumerate(work) if w.sample):
        result.tokens[i] = tokens[j][: counts[j]]
        if NO_TOKEN in result.tokens[i]:
            result.errors[i] = NOTHING_LEFT
        if logprobs is not None and logprobs[line] == logprobs[line]:  # not NaN: the row asked for logprobs
            extra = result.extras[i] = Extra()
            for k in (line + at for at in (range(counts[j]) if path is None else path[j][: counts[j]])):
                ids = [t for t in top_ids[k] if t != NO_TOKEN] if top_ids is not None else []
                values = top_values[k][: len(ids)] if top_values is not None else []
                extra.logprobs.append(TokenLogprobs(logprobs[k], tuple(ids), tuple(values)))
        line += work[i].lines
