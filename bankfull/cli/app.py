"""The commands under one name, and what becomes of their errors.

Nothing heavy is imported here or at the top of a command's file: help must come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from bankfull import __version__
from bankfull.cli.batch import batch
from bankfull.cli.bench import bench
from bankfull.cli.chat import chat
from bankfull.cli.data import data
from bankfull.cli.doctor import doctor
from bankfull.cli.explain import explain
from bankfull.cli.generate import generate
from bankfull.cli.info import info
from bankfull.cli.key import key
from bankfull.cli.limits import limits
from bankfull.cli.options import flat
from bankfull.cli.plan import plan
from bankfull.cli.pull import pull
from bankfull.cli.quality import quality
from bankfull.cli.roofline import roofline
from bankfull.cli.run import run
from bankfull.cli.serve import serve
from bankfull.cli.tune import tune
from bankfull.errors import BankfullError

BAD_INPUT, INTERRUPTED = 2, 130
COMMANDS: tuple[Callable[..., int | None], ...] = (
    run,
    chat,
    serve,
    generate,
    pull,
    info,
    roofline,
    limits,
    plan,
    explain,
    tune,
    quality,
    doctor,
    key,
)

# Rich would draw boxes around the help, at the price of doubling the time until it appears.
app = typer.Typer(
    name="bankfull",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback(invoke_without_command=True)
def options_of_all(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Run language models at the full capacity of this machine, and see how full it is."""
    if version:
        print(f"bankfull {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


for command in COMMANDS:
    app.command(command.__name__)(flat(command))
app.add_typer(batch, name="batch")
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def run_command(arguments: Sequence[str] | None = None) -> int:
    """The exit code. Whatever is wrong with the input becomes one sentence on stderr."""
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a character that the terminal cannot show must not end an answer
    try:
        code = app(args=arguments, prog_name="bankfull", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BankfullError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:
        return 1
    except BrokenPipeError:
        _discard_output()
        return 1
    except SystemExit as leaving:  # typer's own answer to a reader that has gone
        _discard_output()
        return leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:
        # Typer's errors of usage have no public class, but these two names in every version.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _refuse(_unknown_option(error) or error.format_message())
        raise


def _unknown_option(error: Any) -> str | None:
    """What to say of an option that the command does not have; None where something else is wrong."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or not hasattr(error, "possibilities"):
        return None
    from bankfull.cli.hints import about_unknown

    elsewhere: dict[str, list[str]] = {}
    for name, command in _all_commands(typer.main.get_command(app), "bankfull"):
        for known in _options_of(command):
            elsewhere.setdefault(known, []).append(name)
    return about_unknown(option, _options_of(context.command), elsewhere, context.command_path)


def _all_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """With those below it; none that only holds others."""
    below = getattr(command, "commands", None)
    if below is None:
        yield name, command
    for word, one in (below or {}).items():
        yield from _all_commands(one, f"{name} {word}")


def _options_of(command: Any) -> list[str]:
    return [name for option in command.params for name in (*option.opts, *option.secondary_opts) if name[0] == "-"]


def _refuse(problem: object) -> int:
    sys.stdout.flush()
    print("bankfull: " + " ".join(str(problem).split()), file=sys.stderr)
    return BAD_INPUT


def _discard_output() -> None:
    """Nobody reads any more: what is still buffered goes nowhere, so that leaving does not fail a second time."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
