"""The text that a model writes for its own drafter, kept in a file of one JSON object per answer.

Each answer has its own seed, so an interrupted run continues with the answers that are missing.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bankfull.errors import ConfigError, RequestError
from bankfull.llm import LLM, advance
from bankfull.sample.params import SamplingParams
from bankfull.weights.hf_config import read_json
from bankfull.weights.medusa import write_json

DATA, BEGUN = "data.jsonl", "begun.json"
WINDOW_ROWS = 2
"""Requests per row that run or wait at once."""
HELD_OUT = 20
"""Every 20th distinct prompt is held out of the training."""


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A prompt and the model's answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True, slots=True)
class OwnTextOptions:
    prompts: Sequence[str]
    seed: int
    temperature: float
    answer_tokens: int


class OwnText:
    """The answers of a data file, by the number of their prompt."""

    def __init__(self, folder: Path, options: OwnTextOptions) -> None:
        self._path, self._options = folder / DATA, options
        self._answers = _read(self._path, len(options.prompts))
        self._begun = _read_begun(folder / BEGUN)
        """Tokens of answers that the deadline of an earlier run has cut off."""

    @property
    def missing(self) -> list[int]:
        return [i for i in range(len(self._options.prompts)) if i not in self._answers]

    def write(self, llm: LLM, deadline: float | None, done: Callable[[int, str], None]) -> bool:
        """Generate the missing answers with all rows of the engine; whether all are there. `deadline`: on the monotonic
        clock. `done` is called with the number of answers and a note."""
        front, waiting = llm.loaded.frontend, self.missing[::-1]
        most, running, tokens, begun = WINDOW_ROWS * llm.loaded.sizes.rows, set[int](), 0, time.monotonic()
        try:
            with self._path.open("a") as file:
                while waiting or running:
                    if deadline is not None and time.monotonic() > deadline:
                        self._keep_begun(llm, running)
                        return False
                    while waiting and len(running) < most:
                        running.add(waiting[-1])
                        self._submit(llm, waiting.pop())
                    front.engine.scheduler.sealed = not waiting
                    ended = {d.request_id[1] for d in advance(front) if d.finish_reason}
                    for index in sorted(ended & running):
                        running.discard(index)
                        result = front.take((DATA, index))
                        output = result.outputs[0]
                        if output.error is not None:
                            raise RequestError(f"The model cannot answer prompt {index + 1}: {output.error}")
                        self._answers[index] = OwnAnswer(tuple(result.prompt_token_ids), tuple(output.token_ids))
                        line = {"index": index, "prompt": result.prompt_token_ids, "answer": output.token_ids}
                        file.write(json.dumps(line) + "\n")
                        tokens += len(output.token_ids)
                        done(len(self._answers), f"{tokens / (time.monotonic() - begun):.0f} tokens/s")
                    if ended:
                        file.flush()
                os.fsync(file.fileno())
        finally:
            front.engine.scheduler.sealed = True
            for index in running:
                front.abort((DATA, index))
                front.pending.pop((DATA, index), None)
        return True

    def _keep_begun(self, llm: LLM, running: Iterable[int]) -> None:
        """Slices of a few minutes must not lose the answers that all rows are working on."""
        pending = llm.loaded.frontend.pending
        begun = {index: pending[DATA, index].result.outputs[0].token_ids for index in running}
        kept = {str(index): tokens for index, tokens in (self._begun | begun).items() if tokens}
        write_json(self._path.with_name(BEGUN), kept)

    def _submit(self, llm: LLM, index: int) -> None:
        options, front = self._options, llm.loaded.frontend
        text = options.prompts[index]
        params = SamplingParams(
            temperature=options.temperature,
            max_tokens=options.answer_tokens,
            seed=(options.seed << 32) + index,
            detokenize=False,
        )
        prompt = front.encode_chat([{"role": "user", "content": text}]) if llm.loaded.template is not None else text
        begun = self._begun.pop(index, None)
        try:
            front.submit(prompt, params, id=(DATA, index), generated=[begun] if begun else [])
        except RequestError as error:
            raise RequestError(f"Prompt {index + 1}: {error}") from None

    def split(self, least: int) -> tuple[list[OwnAnswer], list[OwnAnswer]]:
        """Answers to train on and answers held out, in the order of the prompts; only those of at least `least` tokens.
        A prompt that occurs several times is on one side."""
        kept = [one for _, one in sorted(self._answers.items()) if len(one.answer) >= least]
        distinct = list(dict.fromkeys(one.prompt for one in kept))
        if len(distinct) < 2:
            raise ConfigError(
                f"Only {len(distinct)} different prompts have an answer of {least} tokens or more, and training needs "
                "two, because one is held out; give more prompts."
            )
        held_out = set(distinct[HELD_OUT - 1 :: HELD_OUT] or distinct[-1:])
        return [one for one in kept if one.prompt not in held_out], [one for one in kept if one.prompt in held_out]


def frequent_tokens(answers: Sequence[OwnAnswer], count: int, vocab: int) -> list[int]:
    """The `count` most frequent token ids of the answers in ascending order. If the answers have fewer, the lowest ids
    are added: in most vocabularies they are the most frequent pieces of text."""
    seen = Counter(token for one in answers for token in one.answer)
    chosen = [token for token, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))][:count]
    others = (token for token in range(vocab) if token not in seen)
    chosen += [token for _, token in zip(range(min(count, vocab) - len(chosen)), others, strict=False)]
    return sorted(chosen)


def _read_begun(path: Path) -> dict[int, list[int]]:
    known = read_json(path) if path.exists() else {}
    return {int(index): tokens for index, tokens in known.items()}


def _read(path: Path, prompts: int) -> dict[int, OwnAnswer]:
    """The whole lines of a file. The last one may be cut off: its answer is generated again."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    answers = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            index, answered = record["index"], OwnAnswer(tuple(record["prompt"]), tuple(record["answer"]))
            valid = 0 <= index < prompts and all(isinstance(t, int) for t in (*answered.prompt, *answered.answer))
        except (ValueError, TypeError, KeyError):
            valid = False
        if not valid:
            raise ConfigError(f"Line {number} of {path} is damaged; delete the line, and its answer is written again.")
        answers[index] = answered
    return answers
