"""Charts of a model's roofline: its operations under the roof, and latency and throughput by batch size."""

from __future__ import annotations

from bankfull.charts import Axis, Chart, Mark, Series
from bankfull.limits.machine.charts import roofline_chart
from bankfull.limits.meter.roofline import RooflineEntry
from bankfull.limits.model.bounds import ModelRoofline
from bankfull.limits.model.speculation import GainForecast

NAMED = 0.02
"""Share of the step time from which an operation is labelled in the chart."""
GAIN_BATCHES = 9
"""Points of the chart of predicted gains: batch sizes 1, 2, 4, ... 256."""


def charts_of(found: ModelRoofline) -> dict[str, Chart]:
    """Charts by file name, without a suffix."""
    charts = {
        "roofline": roof(found),
        "latency": latency(found),
        "throughput": throughput(found),
        "trade-off": trade_off(found),
    }
    forecast = found.speculation
    return charts if forecast is None else {**charts, "speculation": gain_chart(forecast)}


def roof(found: ModelRoofline) -> Chart:
    """Every operation at its arithmetic intensity and its highest reachable rate."""
    peak = found.arithmetic.peak
    bandwidth = found.phases[-1].roofline.bytes_per_second
    series, marks, roofs = [], [], {}
    if found.arithmetic.measured:
        ridge = peak / bandwidth
        marks.append(Mark(ridge, peak, f"ridge: {ridge:.3g} FLOP/byte"))
        roofs[f"the machine's limit in {found.arithmetic.dtype}"] = peak
    for phase in found.phases:
        entries = [entry for entry in phase.roofline.entries if _has_intensity(entry)]
        points = [(e.cost.intensity, e.cost.flops / e.seconds) for e in entries]
        series.append(Series(phase.title, points, kind="points"))
        short = phase.phase if phase.phase == "prefill" else f"decode {phase.sequences}"
        named = [(place, e) for place, e in zip(points, entries, strict=True) if e.share >= NAMED]
        marks += [Mark(*place, f"{e.operation} ({short})") for place, e in named]
    return roofline_chart(f"Roofline on {found.machine.name}", roofs, bandwidth, marks=marks, points=series)


def _has_intensity(entry: RooflineEntry) -> bool:
    """An operation without arithmetic, or without memory traffic, has no arithmetic intensity."""
    return entry.cost.flops > 0 and entry.cost.bytes > 0 and entry.seconds > 0


def latency(found: ModelRoofline) -> Chart:
    points = {point.batch: point.seconds for point in found.curve}
    return _by_batch(found, "Time per token", Axis("time per token", log=True, unit="s"), points)


def throughput(found: ModelRoofline) -> Chart:
    points = {point.batch: point.tokens_per_s for point in found.curve}
    return _by_batch(found, "Tokens per second", Axis("all sequences together", log=True, unit="tokens/s"), points)


def _by_batch(found: ModelRoofline, title: str, axis: Axis, points: dict[int, float]) -> Chart:
    return Chart(
        f"{title} at context {found.query.context}, at best",
        Axis("batch size", log=True),
        axis,
        [Series("decode", list(points.items()))],
        _ridge_marks(found, points),
    )


def trade_off(found: ModelRoofline) -> Chart:
    """Throughput over latency per token, one point per batch size."""
    points = [(point.seconds, point.tokens_per_s) for point in found.curve]
    marks = [Mark(p.seconds, p.tokens_per_s, str(p.batch)) for p in found.curve]
    return Chart(
        f"Throughput against latency at context {found.query.context}, by batch size",
        Axis("time per token", log=True, unit="s"),
        Axis("all sequences together", log=True, unit="tokens/s"),
        [Series("decode", points)],
        marks,
    )


def _ridge_marks(found: ModelRoofline, drawn: dict[int, float]) -> list[Mark]:
    marks = []
    whole = next((p for p in reversed(found.curve) if p.fits), None)
    if whole is not None and any(p.fits is False for p in found.curve):
        marks.append(Mark(whole.batch, drawn[whole.batch], "memory is full"))
    first = next((p for p in found.curve if p.bound == "arithmetic"), None)
    if first is not None:
        marks.append(Mark(first.batch, drawn[first.batch], "compute-bound"))
    return marks


def gain_chart(found: GainForecast) -> Chart:
    """The predicted gain by batch size: with all drafts, and with the depth that is best for the batch."""
    points = found.points([1 << power for power in range(GAIN_BATCHES)])
    return Chart(
        f"Predicted gain of {found.name} at context {found.context}",
        Axis("batch size", log=True),
        Axis("tokens per second, relative to plain decoding", low=0),
        [
            Series(f"{found.shape.nodes} drafts", [(p.full.batch, p.full.gain) for p in points]),
            Series("best depth", [(p.best.batch, p.best.gain) for p in points]),
        ],
    )
