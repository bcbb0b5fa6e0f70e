"""Pages and their words: one template environment, numbers and lists for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedshuffle.methods import colour, label
from fedshuffle.reports.style import on_dark


def render(folder: str, template: str, filters: dict[str, Any], **context: Any) -> str:
    """A template of a folder of the package, everything in it escaped."""
    environment = Environment(
        loader=PackageLoader("fedshuffle", folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    words = (number, percent, joined, duration, label, colour, on_dark)
    environment.filters.update({word.__name__: word for word in words} | filters)
    return environment.get_template(template).render(context)


def number(value: float) -> str:
    """Two significant digits, without an exponent where a person can do without."""
    if value != 0 and abs(value) < 1e-6:
        return f"{value:.1e}"
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


def percent(share: float) -> str:
    """A share in percent, with one decimal."""
    return f"{100 * share:.1f}%"


def duration(seconds: float) -> str:
    """A time for a person."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def joined(words: Sequence[object]) -> str:
    """A list in a sentence."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
