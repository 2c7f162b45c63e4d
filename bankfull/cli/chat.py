"""`bankfull chat`: a conversation on a terminal or through a pipe."""

from __future__ import annotations

from typing import Annotated

import typer

from bankfull.cli.options import ChatSampling, EngineOptions, NoLimit


def chat(
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
    *,
    sampling: ChatSampling,
    no_limit: NoLimit = False,
) -> int | None:
    """Chat with a model.

    A line that ends with a backslash continues on the next line. Ctrl-C stops an answer, /quit or Ctrl-D ends the
    program, and /help lists the other commands. Input may also come from a pipe, one message or command per line; the
    exit code is 2 if one of them was refused.
    """
    from bankfull.torch_parts import leave_out

    leave_out()
    from dataclasses import replace

    from bankfull.errors import RequestError

    llm = engine.load(chats=True)
    if llm.loaded.template is None:
        raise RequestError(f"The model {engine.model!r} has no chat template; use `bankfull run --raw`.")
    params = replace(sampling.params(llm), **sampling.limit(sampling.usual))

    from bankfull.cli.conversation import ChatSession
    from bankfull.cli.lines import lines_of_stdin
    from bankfull.cli.speed import limit_of

    talk = ChatSession(llm, engine.model, params, limit_of(llm, not no_limit), system)
    with lines_of_stdin() as lines:
        return talk.hold(lines)
