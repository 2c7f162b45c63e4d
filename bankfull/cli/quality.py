"""`bankfull quality`: the loss from quantized weights, kernels and dtypes, against a reference on the same text."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Activations, Dtype, Json, KvDtype, KvEvict

if TYPE_CHECKING:
    import torch

    from bankfull.layers.decoder import Decoder
    from bankfull.quality.evaluate import Quality
    from bankfull.state.spec import Layout
    from bankfull.text.tokenizer import Tokenizer

LARGEST_TEXT = 16 << 20


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """Options of the model, the reference and the text."""

    against: Annotated[
        str | None,
        typer.Option(help="Reference model with the same vocabulary.", show_default="the model itself, dequantized"),
    ] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Quantize the model's matrices first: int8, int4, int4:64, fp8 (on a GPU with activations rounded per "
            "token, too), q8_0, ...; after a comma, the type for matrices whose shape does not fit (q4_k,q5_0 or "
            "q4_k,keep). llm.int8: int8 beside the columns that meet large activations, as load_in_8bit.",
            show_default=False,
        ),
    ] = None
    tables: Annotated[
        bool, typer.Option("--tables", help="With --quantize: quantize the embeddings and the head, too.")
    ] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Dtype = "auto"
    providers: Annotated[str, typer.Option(help="auto (the fastest kernels) or torch (the reference).")] = "auto"
    expand: Annotated[bool, typer.Option("--expand", help="Dequantize weights at load; needs more memory.")] = False
    kv_dtype: KvDtype = "auto"
    kv_evict: KvEvict = None
    activations: Activations = "auto"
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 file to evaluate on.", show_default="a text of the package")
    ] = None
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens in one evaluation window.", show_default="512, or the model's context"),
    ] = None
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens that the model computes in one step.", show_default="the window")
    ] = None
    chunks: Annotated[
        bool,
        typer.Option(
            "--chunks", help="Also compare the model with itself: steps of 8, 64 and all tokens with steps of one."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class FrontierOptions:
    """Options of `--frontier`."""

    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Measure many ways to run the model: size, speed and loss of each."),
    ] = False
    ways: Annotated[
        str | None,
        typer.Option(
            help='Ways for --frontier, with semicolons: "bf16; int4:128; int4:32 kv:int8; DIR". A way is a type for '
            "--quantize, a dtype, kv:TYPE, activations:TYPE, sinks:N,window:M, saved, several of these, or another "
            "saved form of the model.",
            show_default="what suits the device",
        ),
    ] = None
    reps: Annotated[int, typer.Option(min=0, help="Timed repetitions for --frontier; 0: no speeds.")] = 3
    cost: Annotated[str, typer.Option(help="Cost in the chart of --frontier: bytes, decode or prefill.")] = "bytes"
    chart: Annotated[
        str | None, typer.Option(help="Draw the frontier to this .svg or .png file.", show_default=False)
    ] = None


def quality(
    model: Annotated[
        str, typer.Argument(help="A model directory, a .gguf file, a hub id (org/name), or a short name (smollm2).")
    ] = "smollm2",
    *,
    options: QualityOptions,
    search: FrontierOptions,
    json: Json = False,
) -> None:
    """Measure the quality of a model as it runs: perplexity, and KL divergence from a reference.

    The reference computes in float32 with dequantized weights and no fast kernels.
    """
    if search.frontier:
        _frontier(model, options, search, json)
        return
    if search != FrontierOptions():
        from bankfull.errors import ConfigError

        raise ConfigError("--ways, --reps, --cost and --chart belong to --frontier; give it, too.")
    from bankfull.cli.terminal import print_table, progress
    from bankfull.quality.evaluate import CHUNKS, across_chunks, evaluate, samples_of

    pair = _prepare(model, options)
    size = pair.window
    shared: dict[str, Any] = {"opening": pair.opening, "window": size, "device": pair.device}
    total = sum(len(part.predicted) for part in samples_of(pair.reference, pair.texts, pair.opening, size))
    with progress("evaluating", total) as advance:
        measured = evaluate(
            pair.model,
            pair.reference,
            pair.texts,
            chunk=options.chunk,
            **shared,
            progress=lambda done: advance(done, "tokens"),
        )
    widths: dict[int, Quality] = {}
    if options.chunks:
        sizes = sorted({min(width, size) for width in CHUNKS})
        with progress("in chunks", total) as advance:
            widths = across_chunks(
                pair.model, pair.texts, chunks=sizes, **shared, progress=lambda done: advance(done, "tokens")
            )
    if json:
        extra = {"chunks": {str(width): each.to_dict() for width, each in widths.items()}} if options.chunks else {}
        print(json_text.dumps(pair.facts | measured.to_dict() | extra))
        return
    print_table(_quality_table(pair.facts, measured))
    if widths:
        print_table(_chunks_table(widths))


def _frontier(model: str, options: QualityOptions, search: FrontierOptions, json: bool) -> None:
    from bankfull.cli.frontier import frontier
    from bankfull.errors import ConfigError

    shared = replace(QualityOptions(), device=options.device, text=options.text, window=options.window)
    if options != shared:
        raise ConfigError(
            "--frontier takes its options from --ways; beside it give only --device, --text and --window."
        )
    frontier(
        model,
        _texts(options.text),
        device_name=options.device,
        ways=search.ways,
        window=options.window,
        reps=search.reps,
        cost=search.cost,
        chart=search.chart,
        json=json,
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models and the tokens to run them on."""

    model: Decoder
    reference: Decoder
    texts: list[list[int]]
    opening: tuple[int, ...]
    window: int
    device: torch.device
    facts: dict[str, Any]


def _prepare(model: str, options: QualityOptions) -> Pair:
    from bankfull.building import plan_build
    from bankfull.combinations import refuse_impossible
    from bankfull.config import RunConfig, StateConfig
    from bankfull.errors import ConfigError
    from bankfull.models.registry import build_model
    from bankfull.ops.pages.rounded import pages_name
    from bankfull.precision import choose_dtype
    from bankfull.quality.evaluate import dequantized
    from bankfull.quality.windows import WINDOW
    from bankfull.quantize.at_load import refuse_unknown, requantized, suited_sparsity
    from bankfull.runtime.device import open_device
    from bankfull.runtime.refused import refuse_eviction_without_use
    from bankfull.state.spec import layout_of
    from bankfull.text.load import load_tokenizer
    from bankfull.weights.locate import locate
    from bankfull.weights.requantized import Requantized, bits_per_weight
    from bankfull.weights.source import open_model

    run = RunConfig(
        options.device,
        options.dtype,
        providers=options.providers,
        expand=options.expand,
        kv_dtype=options.kv_dtype,
        kv_evict=options.kv_evict,
        activations=options.activations,
    )
    if options.tables and options.quantize is None:
        raise ConfigError("--tables extends --quantize; give --quantize, too.")
    device = open_device(options.device)
    if options.quantize is not None:
        refuse_unknown(options.quantize, device.kind)
    texts = _texts(options.text)
    against = model if options.against is None else options.against
    # Opened twice: a source tracks the tensors that one model has read.
    files, reference_files = open_model(locate(model)), open_model(locate(against))
    refuse_impossible(files, device, run)
    tokenizer, _ = load_tokenizer(files)
    if options.against is not None:
        _refuse_other_vocabulary(tokenizer, load_tokenizer(reference_files)[0], model, against)

    files = suited_sparsity(files, run, device.kind, choose_dtype(run.dtype, files, device.kind))
    kept = 0
    if options.quantize is not None:
        files, kept = requantized(files, options.quantize, device, options.tables)
    tables = isinstance(files.source, Requantized) and files.source.tables
    longest = options.window or WINDOW
    build = plan_build(files, run, device, longest)
    built = build_model(files.config, build)
    layout = layout_of(built.states(), StateConfig().page_tokens)
    reference = dequantized(reference_files, device.torch, longest)
    window = options.window or min(WINDOW, built.max_positions, reference.max_positions)
    refuse_eviction_without_use(build.kv_evict, window)
    facts = {
        "model": model,
        "reference": options.against or f"{model}, dequantized",
        "text": "bundled" if options.text is None else str(options.text),
        "quantize": options.quantize,
        "tables": tables,
        "kept": kept,
        "bits_per_weight": bits_per_weight(files.source),
        "dtype": str(build.dtype).removeprefix("torch."),
        "kv_dtype": pages_name(build.pages),
        "kv_evict": options.kv_evict,
        "activations": build.activations.name,
        "providers": options.providers,
        "expand": options.expand,
        "window": window,
        "chunk": options.chunk or window,
    }
    ids = [tokenizer.encode(part, add_bos=False, parse_special=False) for part in texts]
    if build.kv_evict is not None:
        facts |= _eviction_facts(built, reference, tokenizer, layout, window, device.torch)
    return Pair(built, reference, ids, tokenizer.opening if tokenizer.add_bos else (), window, device.torch, facts)


def _eviction_facts(
    model: Decoder, reference: Decoder, tokenizer: Tokenizer, layout: Layout, window: int, device: torch.device
) -> dict[str, Any]:
    """What eviction costs beside perplexity, and what it saves: recall in prompts of the window's length, and bytes of
    state at the window's end, computed token by token."""
    from bankfull.quality.recall import recall, recall_prompts
    from bankfull.state.spec import PagedGroup

    def bytes_of(group: PagedGroup, seen: bool) -> int:
        pages = group.frames_for(window, 1) if seen else -(-window // group.page_tokens)
        return pages * group.page_tokens * group.token_bytes

    prompts = recall_prompts(tokenizer, window)
    return {
        "recall": recall(model, prompts, device),
        "reference_recall": recall(reference, prompts, device),
        "recall_tokens": max((len(prompt.tokens) for prompt in prompts), default=0),
        "state_bytes": sum(bytes_of(group, True) for group in layout.paged),
        "whole_state_bytes": sum(bytes_of(group, False) for group in layout.paged),
    }


def _texts(path: Path | None) -> list[str]:
    from bankfull.errors import RequestError
    from bankfull.quality.windows import bundled_texts

    if path is None:
        return list(bundled_texts().values())
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_TEXT + 1)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if len(data) > LARGEST_TEXT:
        raise RequestError(f"{path} is longer than {LARGEST_TEXT >> 20} MiB; give a shorter text.")
    try:
        return [data.decode()]
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None


def _refuse_other_vocabulary(own: Tokenizer, other: Tokenizer, model: str, against: str) -> None:
    from bankfull.errors import ModelError

    if own.vocab_size != other.vocab_size or any(
        own.token_bytes(id) != other.token_bytes(id) for id in range(own.vocab_size)
    ):
        raise ModelError(
            f"{model} and {against} have different vocabularies, so their predictions cannot be compared; choose a "
            "reference that shares the model's tokenizer."
        )


def _quality_table(facts: dict[str, Any], found: Quality) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    weights = f"{facts['bits_per_weight']:.3g} bits per weight"
    if facts["quantize"]:
        weights += f", rounded to {facts['quantize']}" + (" with the tables" if facts["tables"] else "")
    if facts["kept"]:
        weights += f" ({facts['kept']} matrices do not fit and are kept)"
    dtype, kv_dtype = facts["dtype"], facts["kv_dtype"]
    if kv_dtype != dtype:
        dtype += f", {kv_dtype} keys and values"
    if facts["activations"] == "token":
        dtype += ", activations of 8-bit products rounded per token (lossy)"
    elif facts["activations"] != "float":
        dtype += f", {facts['activations']} activations"
    rows = {
        "model": f"{facts['model']} ({dtype}, kernels: {facts['providers']}, {facts['chunk']} tokens at once)",
        "weights": weights,
        "reference": f"{facts['reference']} (float32, torch)",
        "perplexity": f"{found.perplexity:.4f}",
        "of the reference": f"{found.reference_perplexity:.4f}",
        "ratio": f"{found.ratio:.5f} ({found.ratio - 1:+.3%})",
        "KL mean": f"{found.kl_mean:.3g}",
        "KL median, p99, max": f"{found.kl_median:.3g}, {found.kl_p99:.3g}, {found.kl_max:.3g}",
        "same likeliest token": f"{found.top1:.2%}",
        "log-probability, mean error": f"{found.logprob_error:.3g}",
        "tokens": f"{found.tokens} in {found.windows} windows of up to {facts['window']}",
        "time": f"{found.seconds:.1f} s, reference {found.reference_seconds:.1f} s",
    }
    if found.recovered is not None:
        rows["masked tokens recovered"] = f"{found.recovered:.2%}, reference {found.reference_recovered:.2%}"
        rows["perplexity"] += " (an upper bound)"
        rows["tokens"] = f"{found.tokens} masked ones in {found.windows} samples of up to {facts['window']} tokens"
    if facts["kv_evict"] is not None:
        rows |= _eviction_rows(facts)
    for name, value in rows.items():
        # Plain text, never markup: names come from the user.
        table.add_row(name, Text(value))
    return table


def _eviction_rows(facts: dict[str, Any]) -> dict[str, str]:
    own, whole = facts["state_bytes"], facts["whole_state_bytes"]
    told = {
        "state of a sequence": f"{own:,} bytes after {facts['window']} tokens, {1 - own / whole:.1%} "
        f"less than {whole:,}"
    }
    if facts["recall"] is not None:
        told["recall"] = (
            f"{facts['recall']:.1%}, reference {facts['reference_recall']:.1%}, in prompts of up to "
            f"{facts['recall_tokens']} tokens"
        )
    return {"evicted": f"all but {facts['kv_evict']} (lossy)", **told}


def _chunks_table(widths: dict[int, Quality]) -> Any:
    from rich.table import Table

    table = Table(title="tokens at once, against one at a time")
    for heading in ("tokens", "ratio", "KL mean", "KL p99", "KL max", "same likeliest token"):
        table.add_column(heading, justify="right")
    for width, measured in widths.items():
        figures = (measured.kl_mean, measured.kl_p99, measured.kl_max)
        table.add_row(str(width), f"{measured.ratio:.6f}", *(f"{kl:.3g}" for kl in figures), f"{measured.top1:.2%}")
    return table
