"""`bankfull train lm` and `recall-study`: train small language models from configurations."""

from __future__ import annotations

import json as json_text
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Json, Threads
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.train.lm.run import LmReport, LmTraining
    from bankfull.train.lm.study import RecallStudy, StudyPoint
    from bankfull.train.lm.tasks import Task

TASKS = ("recall", "copy", "text")
BATCH = {"cpu": 32, "cuda": 256}


@dataclass(frozen=True, slots=True)
class LmOptions:
    """Options of the training of a language model."""

    task: Annotated[
        str,
        typer.Option(help="recall (of values by keys), copy, or text (from --text)."),
    ] = "recall"
    length: Annotated[
        int | None, typer.Option(min=3, max=1 << 20, help="Tokens of a sequence.", show_default="64; copy: 63")
    ] = None
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of key and value, for --task recall.")] = 8
    text: Annotated[Path | None, typer.Option(help="A text file, for --task text.", show_default=False)] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="A model whose tokenizer splits the text.", show_default="bytes")
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Random seed of the whole training.")] = 0
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 400
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step.", show_default="32 on a CPU, 256 on a GPU")
    ] = None
    rate: Annotated[float, typer.Option(min=1e-8, max=1.0, help="Highest learning rate.")] = 3e-3
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Stop after this time; the same command continues.", show_default="no limit"),
    ] = None
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between measurements on held-out data.")] = 100
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    threads: Threads = None


def lm(
    config: Annotated[
        str,
        typer.Argument(
            help='A preset (recall-based), or a directory or config.json with model_type "bankfull" '
            "(docs/architectures.md)."
        ),
    ],
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory of the run and its model; an interrupted run continues.")
    ],
    options: LmOptions,
    json: Json = False,
) -> None:
    """Train a small language model from a configuration: associative recall, copying, or text.

    The result is a model directory that `run`, `serve` and every other command take. An interrupted run continues
    where it was, also after kill -9.
    """
    from bankfull.cli.terminal import say
    from bankfull.train.lm.run import train_lm

    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    resolved = _config(config)
    task, tokenizer = _task(resolved, options)
    report = train_lm(resolved, task, tokenizer, _training(options, deadline), output)
    if json:
        print(json_text.dumps({"model": config, "finished": report.finished, **asdict(report)}))
    else:
        show_report(report, output)
    if not report.finished:
        say(f"bankfull: {report.steps} of {report.of_steps} steps are done; the same command continues.")


def show_report(report: LmReport, folder: Path) -> None:
    from rich.table import Table

    from bankfull.cli.terminal import print_table
    from bankfull.limits.units import scaled

    table = Table()
    for heading in ("step", "training loss", "held-out loss", "accuracy"):
        table.add_column(heading, justify="right")
    for one in report.measured:
        loss = "-" if one["loss"] is None else f"{one['loss']:.3f}"
        table.add_row(str(one["step"]), loss, f"{one['held_out_loss']:.3f}", f"{one['accuracy']:.3f}")
    print_table(table)
    print(
        f"accuracy {report.accuracy:.3f} on held-out sequences of {report.task['length']} tokens with "
        f"{scaled(report.state_bytes, 'B')} of state; {scaled(report.parameters)} parameters, {report.seconds:.0f} s"
    )
    print(f"use: bankfull run --model {folder} PROMPT")


def _config(name: str) -> dict[str, Any]:
    from bankfull.limits.model.recipe import config_without_weights
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    bare = config_without_weights(name)
    config = dict(open_model(locate(name)).config if bare is None else bare)
    config.pop("trained", None)
    return config


def _task(config: dict[str, Any], options: LmOptions) -> tuple[Task, dict[str, Any]]:
    from bankfull.models.fields import ConfigFields
    from bankfull.train.lm.tasks import CopyTask, RecallTask, TextWindows
    from bankfull.train.lm.vocabulary import encoded_text, word_tokenizer

    vocab, seed = ConfigFields(config, {}).size("vocab_size"), options.seed
    if options.task not in TASKS:
        raise ConfigError(f"--task {options.task[:40]!r} is unknown; use {', '.join(TASKS)}.")
    if options.task == "text":
        if options.text is None:
            raise ConfigError("--task text needs a text file; give --text FILE.")
        encoded = encoded_text(options.text, options.tokenizer, vocab)
        return TextWindows(encoded.ids, options.length or 64, seed, encoded.digest), encoded.tokenizer
    if options.text is not None or options.tokenizer is not None:
        raise ConfigError(f"--text and --tokenizer belong to --task text, not to {options.task}.")
    if options.task == "copy":
        copy = CopyTask(vocab, options.length or 63, seed)
        return copy, word_tokenizer(copy.words())
    recall = RecallTask(vocab, options.length or 64, options.pairs, seed)
    return recall, word_tokenizer(recall.words())


def _training(options: LmOptions, deadline: float | None) -> LmTraining:
    import torch

    from bankfull.cli.terminal import progress
    from bankfull.runtime.device import open_device
    from bankfull.train.lm.run import LmTraining

    device = open_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return LmTraining(
        options.steps,
        options.batch or BATCH[device.kind],
        options.rate,
        options.seed,
        options.measure_every,
        device.torch,
        deadline,
        progress,
    )


def recall_study(
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Directory of the study; an interrupted one continues.")
    ],
    only: Annotated[str | None, typer.Option(help="Kinds of mixers, separated by commas.", show_default="all")] = None,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 128,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of key and value.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each model.")] = 400,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per step.", show_default="32 on a CPU, 256 on a GPU")
    ] = None,
    rate: Annotated[float, typer.Option(min=1e-8, max=1.0, help="Highest learning rate.")] = 3e-3,
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Random seed of the study.")] = 0,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Stop after this time; the same command continues.", show_default="no limit"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure accuracy on associative recall against bytes of state, for every kind of mixer.

    Trains the models of the presets recall-* and writes study.json and recall.svg.
    """
    from bankfull.cli.terminal import print_table, say
    from bankfull.limits.units import scaled
    from bankfull.train.lm.study import configs, kinds, run_study

    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    chosen = kinds() if only is None else only.split(",")
    models = len(list(configs(chosen)))
    options = LmOptions(
        seed=seed, steps=steps, batch=batch, rate=rate, measure_every=steps, device=device, threads=threads
    )

    def note(point: StudyPoint) -> None:
        say(
            f"bankfull: {point.layers}: accuracy {point.accuracy:.3f} with {scaled(point.state_bytes, 'B')} of state, "
            f"{point.seconds:.1f} s"
        )

    study = run_study(output, chosen, length, pairs, _training(options, deadline), note)
    if json:
        print(json_text.dumps(asdict(study)))
    else:
        print_table(_study_table(study))
    if len(study.points) < models:
        say(f"bankfull: {len(study.points)} of {models} models are trained; the same command continues.")


def _study_table(study: RecallStudy) -> Any:
    from rich.table import Table

    from bankfull.limits.units import scaled

    table = Table()
    for heading in ("mixer", "layers", "state", "accuracy", "parameters", "time"):
        table.add_column(heading, justify="left" if heading in ("mixer", "layers") else "right")
    for point in study.points:
        table.add_row(
            point.kind,
            point.layers,
            scaled(point.state_bytes, "B"),
            f"{point.accuracy:.3f}",
            scaled(point.parameters),
            f"{point.seconds:.1f} s",
        )
    return table
