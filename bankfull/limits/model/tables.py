"""Rich tables of a model: its description, its roofline, and its variants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from bankfull.limits.model.kv_saving import GROUPED
from bankfull.limits.units import duration, scaled

if TYPE_CHECKING:
    from bankfull.limits.meter.roofline import Roofline
    from bankfull.limits.model.bounds import ModelRoofline
    from bankfull.limits.model.info import ModelInfo
    from bankfull.limits.model.inventory import ListedWeight
    from bankfull.limits.model.speculation import GainForecast


def _two_columns() -> tuple[Table, Callable[[str, object], None]]:
    """A table of names and values, and the function that adds a row."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def line(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))  # Text, not markup: values come from untrusted files

    return table, line


def info_table(info: ModelInfo) -> Table:
    table, line = _two_columns()
    shape = info.shape
    line("model", info.path)
    line("architecture", f"{info.architecture} ({info.kind})")
    line("layers", info.layers)
    line("hidden", shape.hidden)
    if shape.heads is not None:
        line("heads", f"{shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_size}")
    if shape.ffn is not None:
        line("feed-forward", shape.ffn)
    line("vocabulary", shape.vocab)
    line("parameters", scaled(info.parameters))
    stored = ", ".join(f"{scheme} {scaled(size, 'B')}" for scheme, size in info.bytes_by_scheme.items())
    line("weights", f"{scaled(info.total_bytes, 'B')} ({stored})")
    if info.quantization is not None:
        line("quantization", info.quantization)
    line("context", f"{info.context_length} tokens")
    for paged in info.state.paged:
        reach = "all tokens" if paged.window is None else str(paged.window)
        reach = f"last {reach} tokens" if isinstance(paged.window, int) else reach
        line("state per token", f"{scaled(paged.token_bytes, 'B')} ({paged.layers} layers, {reach}, {info.dtype})")
    if info.state.recurrent_layers:
        line("state per sequence", f"{scaled(info.state.slot_bytes, 'B')} ({info.state.recurrent_layers} layers)")
    for saving in info.savings:
        claim = "" if saving.claim is None else f"; claimed: {saving.claim:g}x"
        line(
            f"state at context {saving.context}",
            f"{scaled(saving.bytes, 'B')}; MHA and full attention: {scaled(saving.plain_bytes, 'B')}, "
            f"{saving.factor:.1f}x; {GROUPED} KV heads and full attention: {scaled(saving.grouped_bytes, 'B')}, "
            f"{saving.grouped_factor:.1f}x{claim}",
        )
    if info.tokenizer is None:
        line("tokenizer", f"none: {info.tokenizer_problem}")
    else:
        ends = ", ".join(map(str, info.tokenizer.eos_ids)) or "none"
        line("tokenizer", f"{info.tokenizer.kind}, {info.tokenizer.vocab} tokens, end of text: {ends}")
    line("chat template", "yes" if info.chat_template else "no")
    for cost in info.costs:
        what = f"{cost.tokens} tokens" if cost.phase == "prefill" else f"context {cost.context}"
        line(f"{cost.phase}, {what}", f"{scaled(cost.flops, 'FLOP')} and {scaled(cost.bytes, 'B')} per token")
    return table


def weights_table(weights: Sequence[ListedWeight]) -> Table:
    table = Table(caption=f"{len(weights)} weights, {scaled(sum(weight.bytes for weight in weights), 'B')}")
    table.add_column("weight", overflow="fold")
    table.add_column("axes", overflow="fold")
    for heading in ("scheme", "home"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bytes", "generation"):
        table.add_column(heading, justify="right", no_wrap=True)
    for weight in weights:
        table.add_row(
            Text(weight.name),  # Text, not markup: names come from untrusted files
            ", ".join(axis.text for axis in weight.axes),
            weight.scheme,
            weight.home,
            scaled(weight.bytes, "B"),
            str(weight.generation),
        )
    return table


def roofline_table(found: Roofline, title: str = "") -> Table:
    table = Table(title=title or None)
    table.add_column("operation")
    for heading in ("calls", "FLOP", "bytes", "FLOP/byte", "bound", "at best", "share"):
        table.add_column(heading, justify="right")
    rows = found.as_rows()
    for row in rows:
        if row is rows[-1]:
            table.add_section()
        intensity = row["intensity"]
        table.add_row(
            Text(row["operation"]),
            str(row["calls"]),
            scaled(row["flops"]),
            scaled(row["read_bytes"] + row["write_bytes"], "B"),
            "-" if intensity is None else f"{intensity:.3g}",
            row["bound"],
            duration(row["seconds"]),
            f"{row['share']:.1%}",
        )
    return table


def phase_tables(found: ModelRoofline) -> list[Table]:
    tables = []
    for phase in found.phases:
        title = f"{phase.title}: {duration(phase.roofline.seconds)} at best, {scaled(phase.tokens_per_s, 'tokens/s')}"
        tables.append(roofline_table(phase.roofline, title))
    return tables


def summary_table(found: ModelRoofline) -> Table:
    from bankfull.ops.pages.rounded import pages_name

    table, line = _two_columns()
    recipe, machine, ceilings = found.recipe, found.machine, found.machine.ceilings
    memory, context = found.memory, found.query.context
    line("model", f"{recipe.config.get('model_type')}, {scaled(found.metered.parameters)} parameters")
    stored = ", ".join(recipe.quantized_types) or str(recipe.matrices).removeprefix("torch.")
    line(
        "computed in",
        f"{recipe.dtype_name}, weights {stored}, activations {recipe.activations.name}, "
        f"KV cache {pages_name(recipe.kv_dtype)}",
    )
    line("machine", f"{machine.name} ({machine.note})")
    line("read bandwidth", scaled(ceilings.read_at(found.line.cost(1).read), "B/s"))
    line("arithmetic peak", found.arithmetic.shown_rates)
    line("weights", scaled(memory.weights, "B"))
    line(f"state, context {context}", f"{scaled(memory.state_per_sequence, 'B')} per sequence")
    line("step's intermediate results", scaled(memory.step, "B"))
    room = "" if memory.room is None else f" of {scaled(memory.room, 'B')}: {'fits' if memory.fits else 'does not fit'}"
    line(f"peak, {max(found.query.batches)} sequences", f"{scaled(memory.peak, 'B')}{room}")
    if memory.most_sequences is not None:
        line("sequences that fit", memory.most_sequences)
    turning = found.turning_batch
    never = "never: reading a sequence's state takes longer than computing its token"
    unknown = "unknown: its arithmetic was not measured"
    if not found.arithmetic.measured:
        line("decode is compute-bound", unknown)
        return table
    line("decode is compute-bound", never if turning is None else f"from {turning} sequences on")
    linear = found.linear_turning_batch
    line("linear layers alone", "never" if linear is None else f"from {linear} sequences on")
    return table


def curve_table(found: ModelRoofline) -> Table:
    table = Table(title=f"decode at context {found.query.context}, at best")
    for heading in ("sequences", "time per token", "tokens/s each", "tokens/s in all", "bound", "memory", "fits"):
        table.add_column(heading, justify="right")
    for point in found.curve:
        table.add_row(
            str(point.batch),
            duration(point.seconds),
            scaled(1 / point.seconds),
            scaled(point.tokens_per_s),
            point.bound,
            scaled(point.bytes, "B"),
            "-" if point.fits is None else "yes" if point.fits else "no",
        )
    return table


def changes_table(found: ModelRoofline) -> Table:
    batch, context = found.query.batches[0], found.query.context
    table = Table(title=f"variants: decode, batch {batch}, context {context}")
    table.add_column("variant")
    table.add_column("how")
    for heading in ("weights", "state/sequence", "time per token", "faster", "compute-bound from", "fit"):
        table.add_column(heading, justify="right")
    point, memory = found.point(batch), found.memory
    rows = [
        (
            "unchanged",
            "",
            memory.weights,
            memory.state_per_sequence,
            point.seconds,
            1.0,
            found.turning_batch,
            memory.most_sequences,
        )
    ]
    for change in found.changes:
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.options.items())
        how = "another model" if change.trained else options or "another file"
        rows.append(
            (
                change.name,
                how,
                change.weight_bytes,
                change.state_bytes,
                change.seconds,
                change.gain,
                change.turning_batch,
                change.most_sequences,
            )
        )
    for name, how, weights, state, seconds, gain, turning, most in rows:
        table.add_row(
            name,
            how,
            scaled(weights, "B"),
            scaled(state, "B"),
            duration(seconds),
            f"{gain:.2f}x",
            "never" if turning is None else str(turning),
            "-" if most is None else str(most),
        )
    return table


def gain_table(found: GainForecast, batches: Sequence[int], times: str) -> Table:
    """Speculative decoding beside plain decoding by batch size. `times`: whether they are limits or likely."""
    table = Table(title=Text(f"{found.name}: predicted gain at context {found.context}, {times}"))
    for heading in (
        "sequences",
        "drafts each",
        "tokens/step",
        "plain step",
        "verify",
        "drafting",
        "tokens/s in all",
        "gain",
        "best depth",
        "its gain",
    ):
        table.add_column(heading, justify="right")
    for point in found.points(batches):
        full, best = point.full, point.best
        table.add_row(
            str(full.batch),
            str(full.nodes),
            f"{full.tokens:.2f}",
            duration(full.plain_seconds),
            duration(full.verify_seconds),
            duration(full.draft_seconds),
            scaled(full.tokens_per_s),
            f"{full.gain:.2f}x",
            str(best.depth),
            f"{best.gain:.2f}x",
        )
    return table


def gain_notes(found: GainForecast) -> str:
    """The acceptance behind a forecast, and what is assumed."""
    chances = ", ".join(f"{chance:.2g}" for chance in found.shape.acceptance)
    lines = f"acceptance by position, each given that all before it were accepted: {chances}"
    weights = found.source.weight_bytes
    parts = [lines, *([f"the drafter has {scaled(weights, 'B')} of weights of its own"] if weights else [])]
    assumed = [f"assumed: {note}" for note in found.notes]
    return "; ".join([*parts, *assumed]) + "."
