"""Asks a strategy for the drafts of the rows that it drafts for, after the step's tokens were committed."""

from __future__ import annotations

from torch import Tensor

from bankfull.decode.strategy import Strategy, Verdict, View
from bankfull.layers.batch import Batch
from bankfull.runtime.batch import newest_lines
from bankfull.runtime.rows import Rows
from bankfull.types import StepPlan


def propose(strategy: Strategy, rows: Rows, batch: Batch, hidden: Tensor, plan: StepPlan, verdict: Verdict) -> None:
    """Drafts of the next step for the rows that have sampled, after their tokens were committed."""
    work = [w for w in plan.work if w.sample]
    host_rows, widths = [w.row for w in work], [w.lines for w in work]
    width = strategy.width(0) if plan.proposes is None else plan.proposes
    drafted = host_rows if plan.drafted is None else plan.drafted
    chosen = [i for i, row in enumerate(host_rows) if width and row in drafted]

    def newest() -> Tensor:
        return newest_lines(rows.index(batch.logit_index), widths, verdict, rows.index)

    def newest_chosen() -> Tensor:
        return newest()[rows.index(chosen)]

    table = rows.sampling
    view = View(host_rows, rows.tokens, rows.known, table, rows.index, newest, hidden, width, widths)
    strategy.observe(view, verdict)
    if len(chosen) < len(work):
        left = set(range(len(work))) - set(chosen)
        if plan.drafted is None or any(w.drafts or w.row in plan.drafted for w in plan.work):
            strategy.skip([host_rows[i] for i in sorted(left)])  # else the whole step was missed
        if not chosen:
            return
        host_rows, widths = [host_rows[i] for i in chosen], [widths[i] for i in chosen]
        view = View(host_rows, rows.tokens, rows.known, table, rows.index, newest_chosen, hidden, width, widths)
    draft = strategy.propose(view)
    if draft is not None:
        rows.hint(host_rows, draft)
