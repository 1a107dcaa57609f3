"""Size, title, labels and files of all figures; text that holds formulas or line ends."""

import functools
import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from fastformer.apps.system.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORMATS = (".png", ".pdf", ".svg")
DPI = 120
_CHARACTERS_PER_INCH = 9.0  # of a title
# matplotlib includes the first font. The rest draw Chinese, Japanese, Korean and emoji, if installed.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Emoji",
    "Segoe UI Emoji",
)


def figure_format(path: Path | str) -> str:
    """Return the format of a figure by the file name; raises ``ValueError`` unless it ends in .png, .pdf or .svg."""
    suffix = Path(path).suffix.lower()
    if suffix not in _FORMATS:
        raise ValueError(f"{path}: the name of a figure must end in {', '.join(_FORMATS)}")
    return suffix[1:]


def save(figure: "Figure", path: Path | str) -> Path:
    """Write a figure as PNG, PDF or SVG, by the file name, and return the path; folders are created.

    The file is written completely or not at all. Raises ``ValueError`` for the name of another format.
    """
    path, drawn = Path(path), io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format=figure_format(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, drawn.getvalue())
    return path


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of `width` x `height` inches."""
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
    lines = textwrap.wrap(visible(title), int(figure.get_figwidth() * _CHARACTERS_PER_INCH), break_on_hyphens=False)
    figure.suptitle(plain("\n".join(lines)), fontfamily=font_families())


def plain(text: str) -> str:
    """Escape dollar signs, which begin a formula in matplotlib."""
    return text.replace("$", r"\$")


def visible(text: str) -> str:
    r"""Return text in one readable line: ``\n`` and the like for what cannot be printed, ␣ for a text of spaces."""
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


@functools.cache
def font_families() -> list[str]:
    """Return the installed fonts to draw text with, in order of preference."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in _FONTS if name in installed]
