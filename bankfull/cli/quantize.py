"""`bankfull quantize`: a smaller copy of a model, in files that other engines read, too."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bankfull.quantize.allocation import Budget
    from bankfull.quantize.calibration import Sample
    from bankfull.quantize.recipe import QuantizeRecipe
    from bankfull.quantize.save import SavedModel
    from bankfull.weights.source import ModelFiles


def quantize(
    model: Annotated[str, typer.Argument(help="A model directory, a hub id (org/name), or a .gguf file.")],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory for the quantized model.", show_default=False)
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="rtn (round to nearest), awq, gptq, smoothquant (int8 weights and activations), int8 (LLM.int8(), "
            "which bankfull alone reads), fp8, mixed (bits by layer within a budget), qat (tuned for 4, 3 or 2 bits), "
            "wanda or sparsegpt (zeros), neurons (removed in blocks of 64). All but rtn, and fp8 with a scale per "
            "token, read a calibration text."
        ),
    ] = "rtn",
    bits: Annotated[
        str | None,
        typer.Option(
            help="Bits of a weight: 8, 4, 3 or 2; for mixed their mean, such as 3.5.",
            show_default="4; 8 for 8-bit methods, 3 for qat",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="Columns with a common scale: 32, 64, 128, or row.", show_default="row for 8 bits, else 128"),
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="Text for calibrated methods: bundled, a UTF-8 file, or self (the model writes it).")
    ] = "bundled",
    clip: Annotated[
        str | None,
        typer.Option(
            help="mse: clip each group's range where that lowers the error. none: never.", show_default="mse for awq"
        ),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="A zero point for each group; for 4, 3 and 2 bits.")
    ] = False,
    activations: Annotated[
        str | None,
        typer.Option(
            help="How products round activations: float (not at all), int8 (per token); for fp8: token or static.",
            show_default="int8 with a scale per row, token for fp8, else float",
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="smoothquant: share of the outliers that moves into the weights.", show_default="0.5"),
    ] = None,
    ablate: Annotated[
        str | None,
        typer.Option(
            help="awq: instead, keep this share of channels in bfloat16, chosen by activations, weights or random: "
            "0.01, 0.01:weights. An experiment; the result is stored unquantized.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="mixed: bytes of the whole model, such as 4GiB.", show_default=False)
    ] = None,
    kl: Annotated[
        float | None, typer.Option(help="mixed: the most loss, in nats per token.", show_default=False)
    ] = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="wanda, sparsegpt: share of zeros (50%), or 2:4 (two of four weights). neurons: share of the "
            "feed-forward neurons that go.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="qat: steps of tuning.", show_default="200")] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Quantize embeddings and the head to 8 bits, too; for --format gguf.")
    ] = False,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="compressed-tensors (a model directory), gguf (one file in DIR), or safetensors (wanda and sparsegpt: "
            "a directory with all zeros).",
        ),
    ] = "compressed-tensors",
    block: Annotated[
        str | None,
        typer.Option("--type", help="With --format gguf: q4_k, q6_k, ... instead of --bits.", show_default=False),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where methods with a calibration text compute: auto, cpu, cuda or cuda:N.")
    ] = "auto",
    requantize: Annotated[
        bool, typer.Option("--requantize", help="Accept a model that is quantized already; it loses accuracy twice.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a quantized copy of a model, in files that vLLM, transformers or llama.cpp read, too.

    Tensors are read and written one at a time, or layer by layer with a calibration text, so that a model larger than
    the memory works. A run that was interrupted continues if it is started again.
    """
    from bankfull.errors import ConfigError
    from bankfull.quantize.calibration import BUNDLED
    from bankfull.quantize.recipe import MADE_BEFORE, OUTLIERS, parse_recipe
    from bankfull.quantize.save import refuse_early, save_quantized
    from bankfull.quantize.table import METHODS, make_method
    from bankfull.runtime.device import open_device
    from bankfull.weights.fetch import displayed
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    if output is None:
        raise ConfigError("`bankfull quantize` needs a directory for the model: give -o DIR.")
    if output.suffix == ".gguf":
        raise ConfigError(
            f"--output {str(output)!r} must be a directory, in which the .gguf file appears; give its folder."
        )
    recipe = parse_recipe(
        method,
        bits,
        group,
        methods=tuple(METHODS),
        symmetric=not asymmetric,
        clip=clip,
        activations=activations,
        tables=tables,
        form=form,
        block=block,
        calibration=calibration,
        alpha=alpha,
        ablate=ablate,
        sparsity=sparsity,
        size=size,
        kl=kl,
        steps=steps,
    )
    calibrated = recipe.budget is not None or recipe.method in MADE_BEFORE or make_method(recipe).calibrated
    if device not in ("auto", "cpu") and (not calibrated or recipe.budget is not None):
        raise ConfigError(
            f"--device {device[:20]} has no use with --method {method}, which runs on the CPU; leave it out."
        )
    opened = open_device(device).torch
    files = open_model(locate(model))
    refuse_early(files, output, requantize)
    if recipe.method == OUTLIERS and calibration == BUNDLED:
        calibrated = False  # as when a model is loaded
    sequences = _sequences(model, files, calibration) if calibrated else []
    if recipe.budget is not None:
        recipe = _mixed(files, recipe, recipe.budget, sequences)
    with _within_memory(opened), _changed(files, recipe, sequences, output, opened) as changed, displayed() as report:
        saved = save_quantized(
            changed,
            recipe,
            output,
            requantize=requantize,
            sequences=sequences,
            given=files,
            device=opened,
            report=report,
        )
    _print(saved, recipe, json)


@contextmanager
def _within_memory(device: torch.device) -> Iterator[None]:
    import torch

    from bankfull.errors import ConfigError

    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{device} has too little free memory for a layer and its calibration; free some, or use --device cpu."
        ) from None


@contextmanager
def _changed(
    files: ModelFiles, recipe: QuantizeRecipe, sequences: Sequence[Sequence[int]], output: Path, device: torch.device
) -> Iterator[ModelFiles]:
    """The model as it is written: itself, or what a method that changes the whole of it makes of it. A tuning that is
    interrupted continues."""
    from bankfull.cli.terminal import progress
    from bankfull.quantize.recipe import NEURONS, OUTLIERS, QAT

    if recipe.method == OUTLIERS:
        from dataclasses import replace

        from bankfull.quantize.outliers import with_outliers

        with progress("layers calibrated", None) as told:
            source = with_outliers(files, device, sequences or None, told)
        yield replace(files, source=source)
    elif recipe.method == NEURONS:
        from bankfull.quantize.neurons import remove_neurons
        from bankfull.quantize.sparse import parse_pattern

        with progress("layers pruned", None) as told:
            share = parse_pattern(recipe.sparsity).share
            smaller = remove_neurons(files, share, sequences, done=told, device=device)
        yield smaller
    elif recipe.method == QAT:
        with _tuned(files, recipe, sequences, output, device) as tuned:
            yield tuned
    else:
        yield files


@contextmanager
def _tuned(
    files: ModelFiles, recipe: QuantizeRecipe, sequences: Sequence[Sequence[int]], output: Path, device: torch.device
) -> Iterator[ModelFiles]:
    import hashlib
    from dataclasses import replace
    from json import dumps

    import torch

    from bankfull.cli.terminal import progress, say
    from bankfull.quantize.save import finished_layers, scale_dtype_of
    from bankfull.train.qat import LENGTH, QatOptions, tune
    from bankfull.weights.fingerprint import weights_fingerprint
    from bankfull.weights.replaced import ReplacedTensors

    ids = torch.tensor([token for sequence in sequences for token in sequence])
    digest = hashlib.sha256(dumps([sequences, weights_fingerprint(files.path)]).encode()).hexdigest()
    assert recipe.group is not None
    length = max(1, min(LENGTH, max(map(len, sequences)), len(ids) // 2 - 1))  # half of the text may be held out
    options = QatOptions(recipe.bits, recipe.group, recipe.steps, length=length)
    identity = dumps([recipe.about(), digest], sort_keys=True)
    scales = scale_dtype_of(files, recipe)
    with finished_layers(output, identity, "tuning") as folder:
        model, told = tune(files, ids, digest, options, folder, progress, device, scale_dtype=scales)
        say(
            f"bankfull: {told.steps} steps of tuning lower the loss of rounding on held-out text from "
            f"{told.kl_before:.4g} to {told.kl:.4g} nats per token"
        )
        yield replace(files, source=ReplacedTensors(files.source, dict(model.tensors())))


def _mixed(
    files: ModelFiles, recipe: QuantizeRecipe, budget: Budget, sequences: Sequence[Sequence[int]]
) -> QuantizeRecipe:
    """The recipe with a scheme for each matrix."""
    from dataclasses import replace

    from bankfull.cli.terminal import progress, say
    from bankfull.quantize.mixed import mix_bits

    with progress("modules measured at a width", None) as told:
        mixture = mix_bits(files, budget, sequences, group=recipe.group or 64, told=told)
    say(f"bankfull: the mixture loses {mixture.kl:.4g} nats per token on the calibration text")
    return replace(recipe, types=mixture.types)


def _sequences(model: str, files: ModelFiles, choice: str) -> list[list[int]]:
    """Token ids of the calibration text."""
    from bankfull.quantize.calibration import LENGTH, OWN, own_text, sequences_of, text_of
    from bankfull.text.load import load_tokenizer

    tokenizer, _ = load_tokenizer(files)
    length = min(LENGTH, int(files.config.get("max_position_embeddings") or LENGTH))
    if choice == OWN:
        return own_text(_sampling(model), tokenizer.opening or sorted(tokenizer.eos_ids)[:1], length)
    opening = tokenizer.opening if tokenizer.add_bos else ()
    return sequences_of(tokenizer.encode(text_of(choice), add_bos=False), opening, length)


def _sampling(model: str) -> Sample:
    from bankfull import LLM, SamplingParams

    def sample(opening: Sequence[int], count: int, tokens: int) -> list[list[int]]:
        wanted = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=0, n=count)
        [result] = LLM(model).generate([list(opening)], wanted)
        return [list(answer.token_ids) for answer in result.outputs]

    return sample


def _print(saved: SavedModel, recipe: QuantizeRecipe, json: bool) -> None:
    import shlex

    from bankfull.cli.terminal import say
    from bankfull.limits.units import scaled

    command = f"bankfull chat --model {shlex.quote(str(saved.path))}"
    if json:
        import json as text

        print(text.dumps({**asdict(saved), "path": str(saved.path), "command": command}))
        return
    before, after = scaled(saved.bytes_before, "B"), scaled(saved.bytes_after, "B")
    say(
        f"bankfull: {saved.bits_per_weight:.2f} bits per weight in {saved.quantized} matrices, "
        f"{saved.model_bits:.2f} in the whole model; {before} before, {after} after"
        + (f"; {saved.kept} matrices fit no group and stay as they are" if saved.kept else "")
    )
    if recipe.sparsity:
        from bankfull.quantize.recipe import NEURONS
        from bankfull.quantize.sparse import parse_pattern

        if recipe.method == NEURONS:
            say("bankfull: the matrices have fewer rows and columns, so that a step reads fewer bytes on every device")
        else:
            say(f"bankfull: {parse_pattern(recipe.sparsity).statement(recipe.drops_zeros)}")
    print(command)
