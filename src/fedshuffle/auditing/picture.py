"""The picture of an audit: what you meant beside what really happens."""

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle import _figures
from fedshuffle._arrays import FloatArray
from fedshuffle.auditing.result import Audit, groups_by_size
from fedshuffle.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 0.4  # of a bar
_LETTERS = 16  # of a name that are shown
_PER_INCH = 11  # letters


def draw(audit: Audit, ax: "Axes | None") -> "Axes":
    """Draw a pair of bars for every client, or for groups of clients by size."""
    names, groups = groups_by_size(audit)
    each = len(groups) == len(audit.sizes)
    meant = np.array([audit.objective_weights[members].sum() for members in groups])
    really = np.array([audit.effective_weights[members].sum() for members in groups])
    margins = _margins(audit) if each else None
    reach = np.zeros(len(groups)) if margins is None else margins

    ax = _figures.axes_to_draw(ax)
    places = np.arange(len(groups))
    colour = audit.method.style[1] if audit.method else _figures.COLOURS[0]
    hollow: dict[str, Any] = {"facecolor": "white", "edgecolor": _figures.AXIS, "linewidth": 1.2}
    full: dict[str, Any] = {"color": colour, "edgecolor": colour, "linewidth": 1.2}
    thin = None if margins is None else np.where(np.isfinite(reach), reach, 0.0)
    ax.bar(places - _WIDTH / 2, meant, _WIDTH, label="you meant", **hollow)
    ax.bar(places + _WIDTH / 2, really, _WIDTH, yerr=thin, label="really", **full)

    factors = [f"{factor:.2g}\N{MULTIPLICATION SIGN}" for factor in really / meant]
    room = _PER_INCH * _inches(ax)  # for letters in a line
    crowded = max(map(len, factors)) > room / len(groups)
    size = "medium" if len(groups) < 8 else "small"
    points: dict[str, Any] = {"textcoords": "offset points", "color": _figures.INK}
    for place, text, margin in zip(places, factors, reach, strict=True):
        known = np.isfinite(margin)  # nothing is known of a client that was never drawn
        top = max(meant[place], really[place] + margin if known else 0.0)
        at: dict[str, Any] = {"xy": (place, top), "xytext": (0, 4), "rotation": 90 * crowded}
        ax.annotate(text if known else "?", **at, ha="center", fontsize=size, **points)

    short = [_short(name) for name in names]
    if not each:
        short = [f"{name} ({len(members):,})" for name, members in zip(short, groups, strict=True)]
    ax.set_xlabel("client" if each else "examples of a client (number of such clients)")
    tilt = 30 if sum(map(len, short)) + len(short) > room else 0
    ax.set_xticks(places, short, rotation=tilt, ha="right" if tilt else "center")
    ax.tick_params(axis="x", length=0)
    for label in ax.get_xticklabels():
        label.set_parse_math(False)  # a dollar in a name is a dollar
    ax.set_ylabel("share of the objective")
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    ax.margins(y=0.2 if crowded else 0.12)
    ax.legend(frameon=False)
    about = visible(f"{audit.name} on {len(audit.sizes):,} clients, {audit.source}")
    about = textwrap.fill(about, round(1.2 * room))
    title = textwrap.fill(_headline(audit), round(room))
    ax.set_title(title, loc="left", fontweight="bold", pad=22 + 14 * about.count("\n"))
    ax.annotate(about, (0, 1), (0, 7), xycoords="axes fraction", parse_math=False, **points)
    return ax


def _inches(ax: "Axes") -> float:
    """About the width that the axes will have; a layout engine makes better use of the figure."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    grown = 1.2 if figure.get_layout_engine() else 1.0
    return grown * float(ax.get_window_extent().width) / figure.dpi


def _margins(audit: Audit) -> FloatArray | None:
    """Half the interval of each client, or two standard errors; None if the audit is exact."""
    if audit.standard_errors is None:
        return None
    if audit.intervals is None:
        return 2 * audit.standard_errors
    return np.asarray(audit.intervals[:, 1] - audit.intervals[:, 0]) / 2


def _headline(audit: Audit) -> str:
    """The conclusion in one short line."""
    word, sentence = audit.conclusion
    sentence = sentence.partition(";")[0].rstrip(".")
    return sentence[0].upper() + sentence[1:] if word != "undecided" else f"Undecided: {sentence}"


def _short(name: str) -> str:
    """A name for an axis, with control characters shown."""
    name = visible(name)
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
