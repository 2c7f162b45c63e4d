"""A model's limits for a reader: rich tables. No arithmetic but units."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from bankfull.limits.model.bounds import ModelRoofline
from bankfull.limits.show import arithmetic_rate, duration, roofline_table, scaled


def phase_tables(found: ModelRoofline) -> list[Table]:
    tables = []
    for phase in found.phases:
        title = f"{phase.title}: {duration(phase.roofline.seconds)} at best, {scaled(phase.tokens_per_s, 'tokens/s')}"
        tables.append(roofline_table(phase.roofline, title))
    return tables


def summary_table(found: ModelRoofline) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")

    def line(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    recipe, machine, ceilings = found.recipe, found.machine, found.machine.ceilings
    memory, context = found.memory, found.question.context
    line("model", f"{recipe.config.get('model_type')}, {scaled(found.metered.parameters)} parameters")
    stored = ", ".join(recipe.blocks) or str(recipe.matrices).removeprefix("torch.")
    line(
        "runs in",
        f"{recipe.dtype_name}, weights {stored}, multiplied as {recipe.activations}, "
        f"keys and values {str(recipe.kv_dtype).removeprefix('torch.')}",
    )
    line("machine", f"{machine.name} ({machine.note})")
    line("reads", scaled(ceilings.read_at(found.line.cost(1).read), "B/s"))
    line("multiplies", arithmetic_rate(found.arithmetic.peak))
    line("weights", scaled(memory.weights, "B"))
    line(f"state, context {context}", f"{scaled(memory.state_per_sequence, 'B')} per sequence")
    line("a step's own", scaled(memory.step, "B"))
    room = "" if memory.room is None else f" of {scaled(memory.room, 'B')}: {'fits' if memory.fits else 'does not fit'}"
    line(f"peak, {max(found.question.batches)} sequences", f"{scaled(memory.peak, 'B')}{room}")
    if memory.most_sequences is not None:
        line("sequences that fit", memory.most_sequences)
    turning = found.turning_batch
    never = "never: a sequence's own state takes longer to read than its token takes to compute"
    unknown = "not known: that arithmetic was not measured"
    if not found.arithmetic.measured:
        line("decode is bound by arithmetic", unknown)
        return table
    line("decode is bound by arithmetic", never if turning is None else f"from {turning} sequences on")
    linear = found.linear_turning_batch
    line("its linear layers alone", "never" if linear is None else f"from {linear} sequences on")
    return table


def curve_table(found: ModelRoofline) -> Table:
    table = Table(title=f"decode at context {found.question.context}, at best")
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
    batch, context = found.question.batches[0], found.question.context
    table = Table(title=f"what would change: decode, {batch} at once, context {context}")
    table.add_column("variant")
    table.add_column("how")
    for heading in ("weights", "state each", "time per token", "faster", "arithmetic from", "fit"):
        table.add_column(heading, justify="right")
    own, memory = found.point(batch), found.memory
    rows = [
        (
            "as it is",
            "",
            memory.weights,
            memory.state_per_sequence,
            own.seconds,
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
