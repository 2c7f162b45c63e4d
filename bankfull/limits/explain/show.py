"""An explanation as a rich table; converts units, computes nothing else."""

from __future__ import annotations

from rich.table import Table

from bankfull.limits.explain.explain import Explanation
from bankfull.limits.units import duration

TOLD_SHARE = 0.001
"""Least share of the time for blocking to be mentioned."""


def explanation_table(found: Explanation, title: str) -> Table:
    table = Table(title=f"{title}: {duration(found.seconds)}")
    table.add_column("part")
    for heading in (
        "time",
        "share",
        "steps",
        "tokens",
        "batch",
        "at best",
        "% of limit",
        "bound",
        "alone",
        "batch-mates",
        "others' prompts",
        "kernels beyond",
        "host",
    ):
        table.add_column(heading, justify="right")
    for part in found.parts:
        detail = part.detail
        apart = (
            ("-",) * 5
            if detail is None
            else tuple(
                map(_seconds, (detail.own_limit, detail.batch_mates, detail.other_prompts, detail.kernels, detail.host))
            )
        )
        computed = part.steps > 0
        table.add_row(
            part.part,
            duration(part.seconds),
            f"{part.share:.1%}",
            str(part.steps) if computed else "-",
            str(part.tokens) if computed else "-",
            "-" if part.mean_batch is None else f"{part.mean_batch:.3g}",
            _seconds(part.limit_seconds),
            "-" if part.percent_of_limit is None else f"{part.percent_of_limit:.0f}%",
            part.bound or "-",
            *apart,
        )
    return table


def facts(found: Explanation) -> str:
    """Prefix cache hits, blocking, preemptions and speculation in one line; empty if there is nothing to tell."""
    said = []
    if found.blocked_seconds > TOLD_SHARE * found.seconds:
        said.append(f"blocked behind others for {duration(found.blocked_seconds)}")
    if found.cached_tokens:
        worth = "" if found.cached_saved_seconds is None else f", which spared {duration(found.cached_saved_seconds)}"
        said.append(f"{found.cached_tokens} of {found.prompt_tokens} prompt tokens were cached{worth} at the limit")
    if found.preemptions:
        said.append(f"preempted {found.preemptions} times, {found.recomputed_tokens} tokens computed again")
    if found.speculation is not None:
        said.append(found.speculation.sentence)
    return "; ".join(said)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"-{duration(-value)}" if value < 0 else duration(value)
