"""Runs requests to their end while a recorder follows them."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.errors import RequestError
from bankfull.limits.explain.recorder import RequestRecorder, Story
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams


def run_followed(
    llm: LLM, recorder: RequestRecorder, prompts: Sequence[list[int]], max_tokens: int
) -> tuple[Story, Story]:
    """Run all prompts at once, greedily, for exactly max_tokens; the stories of the first and of the whole run."""
    front = llm.loaded.frontend
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    ids = []
    stories: dict[object, Story] = {}
    try:
        for prompt in prompts:
            request = front.submit(prompt, params)
            ids.append(request)
            pending = front.pending[request]
            recorder.follow(request, pending.arrived, drafts=pending.request.drafts)
        while len(stories) < len(ids):
            for delta in front.step():
                if delta.error is not None:
                    raise RequestError(delta.error)
                if delta.finish_reason is not None:
                    pending = front.pending[delta.request_id]
                    ended = pending.arrived + (pending.result.metrics.finished or 0.0)
                    stories[delta.request_id] = recorder.finish(delta.request_id, ended, pending.result.metrics.blocked)
    finally:
        for request in ids:
            recorder.forget(request)
            front.abort(request)
            front.pending.pop(request, None)
    assert recorder.run is not None
    return stories[ids[0]], recorder.run
