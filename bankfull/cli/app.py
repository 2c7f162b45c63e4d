"""The commands under one name, and the exit code and message of their errors.

A command's module is imported when that command runs, and imports nothing heavy at its top: help must appear at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from bankfull import __version__
from bankfull.cli.options import flat
from bankfull.errors import BankfullError, RankLost

BAD_INPUT, INTERRUPTED = 2, 130
COMMANDS = (
    "run",
    "chat",
    "serve",
    "generate",
    "pull",
    "info",
    "roofline",
    "limits",
    "plan",
    "explain",
    "tune",
    "quality",
    "quantize",
    "doctor",
    "key",
    "make-model",
    "warm",
)
"""Commands: each is a function in the module of the same name, with an underscore for a dash."""
GROUPS = ("batch", "bench", "cache", "cluster", "data", "train")
"""Groups of commands: each is a `typer.Typer` in the module of the same name."""


def make_app(names: Sequence[str] = (*COMMANDS, *GROUPS)) -> typer.Typer:
    """The command line with the commands of these names."""
    # Rich would draw boxes around the help, at the price of doubling the time until it appears.
    app = typer.Typer(
        name="bankfull",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback(invoke_without_command=True)(common_options)
    for name in names:
        module = name.replace("-", "_")
        command = getattr(import_module(f"bankfull.cli.{module}"), module)
        if name in GROUPS:
            app.add_typer(command, name=name)
        else:
            app.command(name)(flat(command))
    return app


def common_options(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Run language models at the full capacity of this machine, and see how full it is."""
    if version:
        print(f"bankfull {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run_command(arguments: Sequence[str] | None = None) -> int:
    """The exit code. An error in the input becomes one sentence on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    named = [name for name in arguments[:1] if name in COMMANDS or name in GROUPS]
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")  # a character that the terminal cannot show must not end an answer
    try:
        app = make_app(named) if named else make_app()
        code = app(args=arguments, prog_name="bankfull", standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except BankfullError as error:
        return _refuse(error)
    except RankLost as error:  # no error in the input, and none in this process
        _refuse(error)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except typer.Abort:
        return 1
    except BrokenPipeError:
        _discard_output()
        return 1
    except SystemExit as leaving:  # typer's reaction to a closed pipe
        _discard_output()
        return leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:
        # Typer's usage errors have no public class, but have these two attributes in every version.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _refuse(_unknown_option(error) or error.format_message())
        raise


def _unknown_option(error: Any) -> str | None:
    """The message for an option that the command does not have; None for other errors."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if option is None or context is None or not hasattr(error, "possibilities"):
        return None
    from bankfull.cli.hints import about_unknown

    elsewhere: dict[str, list[str]] = {}
    for name, command in _all_commands(typer.main.get_command(make_app()), "bankfull"):
        for known in _options_of(command):
            elsewhere.setdefault(known, []).append(name)
    return about_unknown(option, _options_of(context.command), elsewhere, context.command_path)


def _all_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The command and all commands below it, without groups."""
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
    """The reader has closed the pipe: discard buffered output, so that exiting does not fail a second time."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
