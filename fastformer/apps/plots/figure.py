"""Shared by all figures: size, title, labels and files.

Tokens, sentences and names of runs may hold dollar signs (which begin a formula), line ends, and characters that no
installed font can draw. Lengths are inches, at the font sizes used here.
"""

import functools
import io
import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fastformer.apps.system.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".pdf", ".svg")
DPI = 120
LONGEST = 24  # characters of a token's label
_INCHES_PER_LINE = 0.14  # of small text, so that adjacent labels do not touch
_INCHES_PER_CHARACTER = 0.085  # of small text, on average
_CHARACTERS_PER_INCH = 9.0  # of a title
# matplotlib includes the first font. The rest draw Chinese, Japanese, Korean and emoji, if installed.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Emoji",
    "Segoe UI Emoji",
)


def figure_format(path: Path | str) -> str:
    """Return the format of a figure by the file name.

    Raises:
        ValueError: the name does not end in .png, .pdf or .svg.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ValueError(f"{path}: the name of a figure must end in {', '.join(_FORMATS)}")
    return suffix[1:]


def save(figure: "Figure", path: Path | str) -> Path:
    """Write a figure as PNG, PDF or SVG, by the file name, and return the path; folders are created.

    The file is written completely or not at all.

    Raises:
        ValueError: the name does not end in .png, .pdf or .svg.
    """
    path, kind = Path(path), figure_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format=kind)
    write_file(path, drawn.getvalue())
    return path


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'fastformer[apps]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def grid(figure: "Figure", rows: int, columns: int, count: int) -> "list[Axes]":
    """Return the first `count` of rows x columns panels."""
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[count:]:
        unused.remove()
    return axes[:count]


def set_title(figure: "Figure", title: str) -> None:
    """Write a title above the whole figure, in as many lines as the figure's width requires."""
    characters = figure.get_figwidth() * _CHARACTERS_PER_INCH / magnification(figure)
    lines = textwrap.wrap(visible(title), max(int(characters), LONGEST), break_on_hyphens=False)
    figure.suptitle(plain("\n".join(lines)), fontfamily=font_families(), fontsize=12 * magnification(figure))


def magnification(figure: "Figure") -> float:
    """Return the factor for the size of titles and axis names; it grows with the figure, which screens scale down."""
    return min(max(figure.get_figwidth() / 12, 1.0), 2.0)


def set_ticks(axes: "Axes", which: Literal["x", "y"], tokens: Sequence[str], inches: float) -> None:
    """Label the positions of an axis with tokens; if labels would overlap, with every n-th token.

    Args:
        axes: the panel.
        which: "x" (labels stand upright) or "y".
        tokens: a token for each position; empty for an axis without labels.
        inches: the length of the axis.
    """
    stride = max(1, -int(-len(tokens) * _INCHES_PER_LINE // inches))
    axes.tick_params(which, labelrotation=90 if which == "x" else 0)
    (axes.set_xticks if which == "x" else axes.set_yticks)(
        range(0, len(tokens), stride),
        labels=[plain(shorten(token)) for token in tokens[::stride]],
        fontsize="small",
        fontfamily=font_families(),
    )


def label_inches(tokens: Sequence[str]) -> float:
    """Return the length in inches of the longest label of `tokens`."""
    return _INCHES_PER_CHARACTER * max(len(shorten(token)) for token in tokens)


def plain(text: str) -> str:
    """Escape dollar signs, which begin a formula in matplotlib."""
    return text.replace("$", r"\$")


def shorten(token: str, longest: int = LONGEST) -> str:
    """Return a label of at most `longest` characters."""
    token = visible(token)
    return token if len(token) <= longest else token[: longest - 1] + "…"


def visible(text: str) -> str:
    """Return text that can be drawn and read: line ends and tabs as in Python, U+XXXX where no font has a character."""
    if text and not text.strip(" "):
        return "␣" * len(text)
    runs = itertools.groupby(text, lambda character: character.isprintable() and ord(character) in _drawable())
    return "".join("".join(run) if drawable else " ".join(map(_code, run)) for drawable, run in runs)


def _code(character: str) -> str:
    return repr(character)[1:-1] if character in "\n\r\t" else f"U+{ord(character):04X}"


@functools.cache
def font_families() -> list[str]:
    """Return the installed fonts to draw text with, in order of preference."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in _FONTS if name in installed]


@functools.cache
def _drawable() -> frozenset[int]:
    """Return the code points that `font_families` can draw."""
    from matplotlib import font_manager

    fonts = (font_manager.get_font(font_manager.findfont(name)) for name in font_families())
    return frozenset().union({ord("\N{NO-BREAK SPACE}")}, *(font.get_charmap() for font in fonts))
