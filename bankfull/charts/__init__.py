"""Charts as SVG, as PNG and in a terminal.

    from bankfull.charts import Axis, Chart, Mark, Series, print_chart, save

    chart = Chart(
        "Latency against batch",
        Axis("batch", log=True),
        Axis("time per token", unit="s"),
        [Series("decode", [(1, 0.010), (8, 0.011), (64, 0.020)]), Series("measured", [(8, 0.013)], kind="points")],
        [Mark(8, 0.011, "here")],
    )
    chart.svg()                # one <svg> element for a page or a file; light or dark as the reader's system
    chart.text(80, 20)         # braille; plain=True: ASCII only, color=True: with escape sequences
    print_chart(chart)         # text for the current terminal: its width, colours and characters
    save(chart, "latency.svg") # or .png, which needs the extra `charts`; check_path checks the path beforehand

Only PNG needs more than Python's standard library. Of the libraries that draw SVG, pygal cannot place labels, has one
log switch for both axes, and puts a script and ids into each chart, which keeps many of them out of one page;
matplotlib needs 80 MB and a second to import.
"""

from bankfull.charts.model import Axis, Chart, Kind, Mark, Point, Series
from bankfull.charts.output import check_path, print_chart, save, save_svg

__all__ = ["Axis", "Chart", "Kind", "Mark", "Point", "Series", "check_path", "print_chart", "save", "save_svg"]
