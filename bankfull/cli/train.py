"""`bankfull train`: train a drafter for one's own model, or a small model from a configuration."""

from __future__ import annotations

import json as json_text
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Activations, Dtype, Json, Threads, flat
from bankfull.cli.train_lm import lm, recall_study
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.assembly import Assembled
    from bankfull.llm import LLM
    from bankfull.train.recipe import TrainingRecipe
    from bankfull.train.report import Choice, DrafterReport
    from bankfull.train.run import MakeTrainer
    from bankfull.train.text import OwnAnswer
    from bankfull.train.trainer import Trainer

PROMPTS, ANSWER_TOKENS = 2000, 256
BATCH = {"cpu": 2, "cuda": 16}
STATE_GIB = 2.0

train = typer.Typer(
    rich_markup_mode=None,
    help="Train a drafter for speculative decoding, or a small language model (lm). For a drafter, the model stays as "
    "it is and writes the training text itself.",
)


@train.callback(invoke_without_command=True)
def trained_kinds(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise ConfigError(f"Choose what to train: {', '.join(_name(command) for command in COMMANDS)}.")


Model = Annotated[
    str, typer.Argument(help="A model directory, a .gguf file, a hub id (org/name), or a short name (smollm2).")
]
Output = Annotated[
    Path, typer.Option("-o", "--output", help="Directory of the run and its result; an interrupted run continues.")
]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of every kind of drafter."""

    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Prompts for the training text: one per line, or a .jsonl file with "prompt" fields.',
            show_default="tasks of the package",
        ),
    ] = None
    count: Annotated[
        int | None,
        typer.Option(min=2, help="Answers that the model writes.", show_default=f"{PROMPTS}, or one per prompt given"),
    ] = None
    answer_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = ANSWER_TOKENS
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature of the answers.")] = 0.7
    seed: Annotated[int, typer.Option(min=0, max=2**30, help="Random seed of the whole training.")] = 0
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2000
    batch: Annotated[
        int | None, typer.Option(min=1, help="Answers per optimizer step.", show_default="2 on a CPU, 16 on a GPU")
    ] = None
    rate: Annotated[float, typer.Option(min=1e-8, max=1.0, help="Highest learning rate.")] = 1e-3
    minutes: Annotated[
        float | None,
        typer.Option(min=0.001, help="Stop after this time; the same command continues.", show_default="no limit"),
    ] = None
    measure_every: Annotated[int, typer.Option(min=1, help="Steps between measurements of the acceptance.")] = 100
    states: Annotated[float, typer.Option(min=0.0, help="GiB of hidden states to keep; others are recomputed.")] = (
        STATE_GIB
    )
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Dtype = "auto"
    activations: Activations = "auto"
    threads: Threads = None


def medusa(
    model: Model,
    *,
    output: Output,
    options: TrainOptions,
    heads: Annotated[int, typer.Option(min=1, max=16, help="Heads: draft tokens on a path, at most.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks of a head.")] = 1,
    vocabulary: Annotated[
        int, typer.Option(min=16, help="Token ids that the heads can propose: the most frequent ones of the answers.")
    ] = 8192,
    json: Json = False,
) -> None:
    """Train Medusa heads: residual blocks that use the model's own head.

    The model first writes answers to prompts; they are the training text. Every 20th prompt is held out, and the
    acceptance is measured on its answers. An interrupted run continues where it was, also after kill -9.
    """
    run = PreparedTraining(model, output, options, json)

    def make(loaded: Assembled, ids: list[int], about: dict[str, Any]) -> Trainer:
        from bankfull.train.medusa import MedusaTrainer

        return MedusaTrainer(loaded, heads, layers, ids, about)

    run.train_heads("medusa", {"heads": heads, "layers": layers, "vocabulary": vocabulary}, make, heads + 2)


def eagle(
    model: Model,
    *,
    output: Output,
    options: TrainOptions,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens on a path that the head is trained for.")] = 5,
    inner: Annotated[
        int, typer.Option(min=0, help="Width of the feed-forward layer.", show_default="8/3 of the hidden size")
    ] = 0,
    vocabulary: Annotated[
        int, typer.Option(min=16, help="Token ids that the head can propose: the most frequent ones of the answers.")
    ] = 8192,
    json: Json = False,
) -> None:
    """Train an EAGLE-3 head: one decoder layer that continues hidden states of three of the model's layers.

    The model first writes answers to prompts; they are the training text. Every 20th prompt is held out, and the
    acceptance is measured on its answers. An interrupted run continues where it was, also after kill -9.
    """
    run = PreparedTraining(model, output, options, json)

    def make(loaded: Assembled, ids: list[int], about: dict[str, Any]) -> Trainer:
        from bankfull.train.eagle import EagleTrainer

        return EagleTrainer(loaded, depth, inner, ids, about)

    run.train_heads("eagle", {"depth": depth, "inner": inner, "vocabulary": vocabulary}, make, depth + 2)


def draft(
    model: Model,
    *,
    output: Output,
    options: TrainOptions,
    layers: Annotated[
        int, typer.Option(min=0, max=64, help="Layers.", show_default="chosen for this machine, with the width")
    ] = 0,
    width: Annotated[
        int, typer.Option(min=0, max=65536, help="Hidden size, a multiple of 64.", show_default="chosen")
    ] = 0,
    depth: Annotated[int, typer.Option(min=1, max=16, help="Draft tokens whose acceptance is measured.")] = 5,
    json: Json = False,
) -> None:
    """Train a draft model: a small Llama with the same vocabulary that learns the model's own distribution.

    Its size has the highest gain to expect on this machine, unless it is given. The model first writes answers to
    prompts; they are the training text. Every 20th prompt is held out, and the acceptance is measured on its answers.
    An interrupted run continues where it was, also after kill -9. The result is a checkpoint of its own.
    """
    if width % 64:
        raise ConfigError(f"--width {width} is not a multiple of 64; give {width // 64 * 64 + 64}.")
    run = PreparedTraining(model, output, options, json)
    from bankfull.train.draft_size import size_of

    layers, width = _draft_size(run.llm, output, layers, width)

    def make(loaded: Assembled, answers: Sequence[OwnAnswer], about: dict[str, Any]) -> Trainer:
        from bankfull.train.draft import DraftTrainer

        size = size_of(loaded.model, layers, width)
        return DraftTrainer(loaded, run.llm.tokenizer, size, depth, options.seed, about)

    run.train("draft", {"layers": layers, "width": width, "depth": depth}, make, depth + 1)


def _draft_size(llm: LLM, folder: Path, layers: int, width: int) -> tuple[int, int]:
    """Layers and width: those that are given, those of the run that continues, or the best ones for this machine."""
    from bankfull.cli.terminal import say
    from bankfull.limits.meter.step_limit import step_limit_of
    from bankfull.train.draft_size import best_size, usual_size
    from bankfull.train.recipe import shape_of_run

    known = shape_of_run(folder, "draft")
    if not (layers and width) and known:
        return layers or known["layers"], width or known["width"]
    if not (layers and width):
        limit = step_limit_of(llm, measure=True)
        if limit is None:
            size, why = usual_size(llm.loaded.model), "the usual size, because this machine cannot be measured"
        else:
            best = best_size(llm.loaded.model, limit)
            size, why = best.size, f"{best.gain:.2f}x to expect with depth={best.depth}, before anything is measured"
        layers, width = layers or size.layers, width or size.width
        say(f"bankfull: a draft model of {layers} layers and hidden size {width}: {why}.")
    return layers, width


def streaming(
    model: Model,
    *,
    output: Output,
    options: TrainOptions,
    streams: Annotated[int, typer.Option(min=1, max=16, help="Streams: draft tokens on a path, at most.")] = 4,
    layers: Annotated[int, typer.Option(min=1, max=64, help="Top layers of the model that the streams run in.")] = 4,
    rank: Annotated[
        int, typer.Option(min=1, max=1024, help="Rank of the adapters; the entry map has four times it.")
    ] = 64,
    vocabulary: Annotated[
        int, typer.Option(min=16, help="Token ids that streams can propose: the most frequent ones of the answers.")
    ] = 8192,
    json: Json = False,
) -> None:
    """Train streams for Speculative Streaming: adapters of the model's own top layers.

    The model stays as it is: only the streams run with the adapters. Text, measurements and slices are those of
    `bankfull train medusa`. The result serves `streaming` and `tree-streaming`.
    """
    run = PreparedTraining(model, output, options, json)
    from bankfull.decode.streams import top_attention

    top_attention(run.llm.loaded.model, layers)  # refuses models without layers that streams can run in
    shape = {"streams": streams, "layers": layers, "rank": rank, "vocabulary": vocabulary}

    def make(loaded: Assembled, ids: list[int], about: dict[str, Any]) -> Trainer:
        from bankfull.train.streaming import StreamTrainer

        return StreamTrainer(loaded, streams, layers, rank, ids, about)

    run.train_heads("streaming", shape, make, streams + 2)


class PreparedTraining:
    """A training with its prompts and its model loaded. `--minutes` counts from here on."""

    def __init__(self, model: str, output: Path, options: TrainOptions, json: bool) -> None:
        self._deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
        self._model, self._output, self._options, self._json = model, output, options, json
        self._prompts = _prompts(options)
        self.llm = _load(model, options)

    def train(
        self,
        kind: str,
        shape: dict[str, int],
        make: Callable[[Assembled, Sequence[OwnAnswer], dict[str, Any]], Trainer],
        least_answer: int,
    ) -> None:
        """Train a drafter of these sizes, save it and print the report. `make`: the trainer, from the model, its
        answers, and what the drafter's config.json records. `least_answer`: tokens of an answer that is long enough."""
        recipe = _recipe(kind, self.llm, self._options, self._prompts, shape)
        about = {"base_model_name_or_path": self._model, "recipe": asdict(recipe)}
        _train(
            self.llm,
            self._model,
            self._output,
            self._options,
            recipe,
            self._prompts,
            lambda loaded, answers: make(loaded, answers, about),
            least_answer,
            self._deadline,
            self._json,
        )

    def train_heads(
        self,
        kind: str,
        shape: dict[str, int],
        make: Callable[[Assembled, list[int], dict[str, Any]], Trainer],
        least_answer: int,
    ) -> None:
        """The same for a drafter that proposes only `shape["vocabulary"]` token ids, the most frequent ones of the
        answers."""

        def with_ids(loaded: Assembled, answers: Sequence[OwnAnswer], about: dict[str, Any]) -> Trainer:
            from bankfull.train.text import frequent_tokens

            return make(loaded, frequent_tokens(answers, shape["vocabulary"], loaded.model.vocab), about)

        self.train(kind, shape, with_ids, least_answer)


def _load(model: str, options: TrainOptions) -> LLM:
    import logging

    from bankfull.familiar import configure
    from bankfull.llm import LLM
    from bankfull.loading import load
    from bankfull.runtime.device import open_device

    logging.basicConfig(format="bankfull: %(message)s", level=logging.WARNING)
    device = open_device(options.device)
    # Without drafts, a step's rows do not depend on the machine's speed, nor do roundings that depend on the rows.
    given: dict[str, Any] = {"speculative": "off", "threads": options.threads}
    given |= {"dtype": options.dtype, "activations": options.activations}
    if device.kind == "cuda":
        given["memory"] = "25%"  # the rest is for training
    loaded = load(model, *configure(given)[:3], None, device=device)
    return LLM(model, loaded=loaded)


def _prompts(options: TrainOptions) -> list[str]:
    from bankfull.train.prompts import own_prompts, read_prompts, repeated

    if options.prompts is None:
        return own_prompts(options.count or PROMPTS, options.seed)
    given = read_prompts(options.prompts)
    return repeated(given, options.count or len(given))


def _recipe(kind: str, llm: LLM, options: TrainOptions, prompts: list[str], shape: dict[str, int]) -> TrainingRecipe:
    from bankfull.train.recipe import TrainingRecipe, digest_of
    from bankfull.weights.fingerprint import weights_fingerprint

    loaded = llm.loaded
    return TrainingRecipe(
        kind,
        weights_fingerprint(loaded.files.path),
        f"{str(loaded.build.dtype).removeprefix('torch.')} {loaded.build.activations.name}",
        options.seed,
        len(prompts),
        digest_of(prompts),
        options.temperature,
        options.answer_tokens,
        options.steps,
        options.batch or BATCH[loaded.device.kind],
        options.rate,
        shape,
    )


def _train(
    llm: LLM,
    model: str,
    output: Path,
    options: TrainOptions,
    recipe: TrainingRecipe,
    prompts: list[str],
    make: MakeTrainer,
    least_answer: int,
    deadline: float | None,
    json: bool,
) -> None:
    from bankfull.cli.terminal import progress, say
    from bankfull.limits.meter.step_limit import step_limit_of
    from bankfull.train.report import report_of
    from bankfull.train.run import TrainingOptions, run_training

    how = TrainingOptions(deadline, options.measure_every, int(options.states * 2**30), progress)
    outcome = run_training(llm, recipe, prompts, output, make, least_answer, how)
    finished = outcome.acceptance is not None and outcome.progress.step >= recipe.steps
    stage = {"finished": finished, "answers": outcome.answers, "of_answers": len(prompts), "of_steps": recipe.steps}
    if outcome.acceptance is None:
        if json:
            print(json_text.dumps({"model": model, **stage, "steps": 0}))
        say(f"bankfull: {outcome.answers} of {len(prompts)} answers are written; the same command continues.")
        return
    report = report_of(outcome, step_limit_of(llm, measure=True), trees=recipe.kind != "draft")
    if json:
        print(json_text.dumps({"model": model, **stage, **report.as_json()}))
    else:
        _show(report, recipe, output)
    if not finished:
        say(f"bankfull: {outcome.progress.step} of {recipe.steps} steps are done; the same command continues.")


def _show(report: DrafterReport, recipe: TrainingRecipe, folder: Path) -> None:
    from bankfull.cli.terminal import print_table
    from bankfull.limits.units import scaled
    from bankfull.train.report import total_bytes

    print_table(_acceptance_table(report))
    print_table(_choices_table(report))
    best, outcome = report.best, report.outcome
    gain = "" if best.gain is None else f", {best.gain:.2f}x the tokens per second of one stream by the step cost model"
    print(f"best: {best.kind} of {best.nodes} drafts, {best.tokens:.2f} tokens per step{gain}")
    files = ", ".join(f"{file.name} {scaled(file.stat().st_size, 'B')}" for file in outcome.files)
    print(f"files: {files}; together {scaled(total_bytes(outcome.files), 'B')}")
    print(f"use: --speculative {recipe.kind}:{folder},{_options_of(best, recipe.kind)}")


def _options_of(best: Choice, kind: str) -> str:
    if best.kind == "tree":
        return f"nodes={best.nodes}"
    if kind == "draft":
        return f"depth={best.nodes}"
    return f"depth={best.nodes},tree=chain" if kind == "eagle" else f"nodes={best.nodes},tree=chain"


def _acceptance_table(report: DrafterReport) -> Any:
    from rich.table import Table

    outcome = report.outcome
    assert outcome.acceptance is not None
    before = outcome.progress.measured[0]["acceptance"]
    shown = Table()
    for heading in ("draft position", "before training", "acceptance", "among 2 candidates", "among 10"):
        shown.add_column(heading, justify="right")
    for depth, ranks in enumerate(outcome.acceptance.by_rank):
        chances = (before[depth], ranks[0], sum(ranks[:2]), sum(ranks))
        shown.add_row(str(depth + 1), *(f"{chance:.3f}" for chance in chances))
    return shown


def _choices_table(report: DrafterReport) -> Any:
    from rich.table import Table

    shown = Table()
    for heading in ("drafts", "nodes", "tokens per step", "cost of a step", "expected gain"):
        shown.add_column(heading, justify="left" if heading == "drafts" else "right")
    for one in report.choices:
        cost = "-" if one.cost is None else f"{one.cost:.2f}x"
        gain = "-" if one.gain is None else f"{one.gain:.2f}x"
        shown.add_row(one.kind, str(one.nodes), f"{one.tokens:.2f}", cost, gain)
    return shown


def _name(command: Callable[..., None]) -> str:
    return command.__name__.replace("_", "-")


COMMANDS: tuple[Callable[..., None], ...] = (medusa, eagle, streaming, draft, lm, recall_study)
for command in COMMANDS:
    train.command(_name(command))(flat(command))
