"""Charts are drawn here and nowhere else: as SVG, as PNG, and in a terminal.

    from bankfull.limits.charts import Axis, Chart, Mark, Series, print_chart, save

    chart = Chart(
        "Latency against batch",
        Axis("batch", log=True),
        Axis("time per token", unit="s"),
        [Series("decode", [(1, 0.010), (8, 0.011), (64, 0.020)]), Series("measured", [(8, 0.013)], kind="points")],
        [Mark(8, 0.011, "here")],
    )
    chart.svg()                # a whole <svg> element; put into HTML as it is, light or dark as the reader's system is
    chart.text(80, 20)         # braille; plain=True for letters only, color=True with escape sequences
    print_chart(chart)         # text for the terminal at hand: its width, colours, and characters
    save(chart, "latency.svg") # or .png, which needs the extra `charts`; check_path tells beforehand whether it can be

Nothing here needs more than Python's own library, but for PNG.
"""

from bankfull.limits.charts.model import Axis, Chart, Kind, Mark, Point, Series
from bankfull.limits.charts.output import check_path, print_chart, save

__all__ = ["Axis", "Chart", "Kind", "Mark", "Point", "Series", "check_path", "print_chart", "save"]
