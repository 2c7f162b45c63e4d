"""Output of charts to the terminal or to a file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

from bankfull.charts.model import Chart
from bankfull.errors import ConfigError

WIDEST, PIPED = 120, 100
"""Most columns of a chart, and the columns of one without a terminal."""
PNG_SCALE = 2

Theme = Literal["auto", "light", "dark"]


def print_chart(chart: Chart, height: int = 18, stream: TextIO | None = None) -> None:
    """Print in colour if the terminal supports it, and in ASCII if the stream cannot encode braille."""
    out = sys.stdout if stream is None else stream
    terminal = out.isatty()
    width = min(shutil.get_terminal_size().columns, WIDEST) if terminal else PIPED
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    out.write(chart.text(width, height, color=color, plain=not _has_braille(out)))


def save(chart: Chart, path: str | Path) -> None:
    """Write a .svg or .png file, by its suffix."""
    save_svg(lambda theme: chart.svg(theme=theme), path)


def save_svg(draw: Callable[[Theme], str], path: str | Path) -> None:
    """Write a drawing that is made for a theme."""
    check_path(path)
    path = Path(path)
    data = draw("auto").encode() if path.suffix.lower() == ".svg" else _png(draw("light"))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; choose another file.") from None


def check_path(path: str | Path) -> None:
    """Check before long work whether the chart can be written to `path`."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ConfigError(f"{path} must end in .svg or .png: the suffix selects the format.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {path.absolute().parent}.")
    if suffix == ".png":
        try:
            import resvg_py  # noqa: F401

            _fonts()
        except (ImportError, OSError):
            raise ConfigError(
                f"{path.name} needs resvg and its font to become a PNG: pip install 'bankfull[charts]', "
                "or save an .svg instead."
            ) from None


def _png(svg: str) -> bytes:
    import resvg_py

    # Characters that this font lacks come from the system's fonts; those missing there, too, become boxes.
    return resvg_py.svg_to_bytes(svg_string=svg, zoom=PNG_SCALE, font_files=_fonts(), sans_serif_family="Open Sans")


def _fonts() -> list[str]:
    """resvg silently omits text without a font, so a missing font file is an OSError here."""
    from ttf_opensans import OPENSANS_REGULAR, OPENSANS_SEMIBOLD

    return [str(font.path.resolve(strict=True)) for font in (OPENSANS_REGULAR, OPENSANS_SEMIBOLD)]


def _has_braille(stream: TextIO) -> bool:
    try:
        "\u28ff│└─●".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
