"""The look of the pictures that results draw of themselves; matplotlib is imported when used."""

from typing import TYPE_CHECKING

from fedshuffle.errors import optional_import

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, AXIS, GRID = "#222222", "#8a8f98", "#e6e8eb"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colours that people with any colour vision tell apart (Okabe and Ito), one for each result."""
_WIDE = 1000.0  # a logarithmic axis between ends of this ratio shows powers of ten alone
DASHES = ("-", "--", ":", "-.")


def axes_to_draw(ax: "Axes | None") -> "Axes":
    """These axes, or those of a new figure that a notebook shows; two spines and a light grid."""
    if ax is None:
        pyplot = optional_import("matplotlib.pyplot", "a picture", "report")
        new: Axes = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")[1]
        ax = new
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(AXIS)
    ax.grid(visible=True, axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    return ax


def next_colour(ax: "Axes") -> str:
    """The first colour that no line of these axes has."""
    used = {line.get_color() for line in ax.get_lines()}
    return next((colour for colour in COLOURS if colour not in used), COLOURS[0])


def log_scale(ax: "Axes") -> None:
    """A logarithmic vertical axis with plain numbers, unless it spans many powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax.set_yscale("log")
    low, high = ax.get_ylim()
    if high / low < _WIDE:
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_locator(NullLocator())
