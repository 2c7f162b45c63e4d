"""`bankfull run`: one prompt, one answer."""

from __future__ import annotations

import json as json_text
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import EngineOptions, Json, NoLimit, RunSampling

if TYPE_CHECKING:
    from bankfull.cli.answer import FinishedAnswer
    from bankfull.cli.speed import Speed
    from bankfull.frontend import Prompt
    from bankfull.llm import LLM

MORE = "--max-tokens N allows more, --max-tokens none fills the context"


def run(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if omitted or -.")] = None,
    *,
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, without the chat template.")] = False,
    n: Annotated[int, typer.Option("-n", "--n", help="Number of answers; printed when all are complete.")] = 1,
    sampling: RunSampling,
    json: Json = False,
    no_limit: NoLimit = False,
    naive: Annotated[bool, typer.Option("--naive", help="Run the slow baseline: greedy, without a KV cache.")] = False,
) -> int | None:
    """Answer one prompt, and report the speed.

    The text streams to stdout; one line about the speed follows on stderr. The model's chat template, if any, formats
    the prompt. Sampling follows the model's recommendation; --temperature 0 is greedy and exact.
    """
    from bankfull.torch_parts import leave_out

    leave_out()
    from bankfull.cli.sampling import params_from
    from bankfull.cli.terminal import say, write_text
    from bankfull.errors import ConfigError, RequestError

    text = _prompt_text(prompt)
    if not text:
        raise RequestError("The prompt is empty; give at least one character.")
    if raw and system is not None:
        raise ConfigError("--system needs the chat template, which --raw turns off; give one of the two.")
    given = sampling.given() | ({"n": n} if n != 1 else {})
    if naive:
        from bankfull.cli.naive import check_naive

        check_naive(given)
    llm = engine.load(chats=not raw)
    asked = _as_asked(llm, text, system, raw)
    front = llm.loaded.frontend
    given |= sampling.limit(front.max_len - len(front.encode(asked)[1]))
    params = params_from(llm.default_params(), given)

    from bankfull.cli.answer import StepLog, answer, cut_off
    from bankfull.cli.speed import limit_of, speed_of

    streams = not json and n == 1
    show = (lambda delta: write_text(delta.text)) if streams else None
    if naive:
        from bankfull.cli.naive import naive_answer

        answered = naive_answer(llm, asked, given, show)
    else:
        answered = answer(llm, asked, params, StepLog(llm), show)
    if not json:
        _finish_text(answered, streamed=streams)
    if problem := next((o.error for o in answered.result.outputs if o.error), None):
        raise RequestError(problem)
    if answered.interrupted:
        return 130
    speed = speed_of(answered, limit_of(llm, not no_limit))
    if json:
        print(json_text.dumps(_as_json(engine.model, answered, speed), ensure_ascii=False))
    else:
        if ended := cut_off(answered.result, llm.max_model_len, more=MORE, when_full="shorten the prompt"):
            say(f"bankfull: {ended}")
        say(speed.line())
    return None


def _prompt_text(prompt: str | None) -> str:
    from bankfull.cli.terminal import read_input
    from bankfull.errors import RequestError

    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise RequestError("No prompt was given; give it after `bankfull run`, or pipe it in.")
    return read_input()


def _as_asked(llm: LLM, text: str, system: str | None, raw: bool) -> Prompt:
    from bankfull.errors import ConfigError

    if raw or llm.loaded.template is None:
        if system is not None:
            raise ConfigError(
                "This model has no chat template, so --system cannot be used; put the text into the prompt."
            )
        return text
    opening = [] if system is None else [{"role": "system", "content": system}]
    return llm.loaded.frontend.encode_chat([*opening, {"role": "user", "content": text}])


def _finish_text(made: FinishedAnswer, streamed: bool) -> None:
    from bankfull.cli.terminal import write_text

    outputs = made.result.outputs
    for output in outputs:
        if not streamed:
            heading = f"--- {output.index + 1} of {len(outputs)}\n" if len(outputs) > 1 else ""
            write_text(heading + output.text)
        if not output.text.endswith("\n"):
            write_text("\n")


def _as_json(model: str, made: FinishedAnswer, speed: Speed) -> dict[str, Any]:
    first, *others = samples = [
        {"text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason, "stop_reason": o.stop_reason}
        for o in made.result.outputs
    ]
    usage = {
        "prompt_tokens": speed.prompt_tokens,
        "cached_tokens": speed.cached_tokens,
        "completion_tokens": speed.output_tokens,
    }
    several = {"samples": samples} if others else {}
    return {"model": model, **first, **several, "usage": usage, "metrics": speed.as_json()}
