"""The table of characteristics beside the paper's, as a page.

``python -m fedshuffle.experiments.characteristics.page > docs/characteristics.md`` writes it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping

from fedshuffle import methods
from fedshuffle.experiments.characteristics.experiment import CHARACTERISTICS, characteristics

PAPER: dict[str, str] = {
    "fednova": "yynynny",
    "fedlin": "ynnyynn",
    "mime": "yynnyyn",
    "fedrr": "ynynnnn",
    "fedavg-rr": "yyynnny",
    "fednova-rr": "yyyynny",
    "fedshuffle": "yyyynny",
    "fedshuffle-mvr": "yyyyyyy",
}
"""The paper's own table: yes or no for each characteristic, in order."""

_REASONS: dict[tuple[str, tuple[str, ...]], str] = {
    ("client sampling", ("fednova", "fedavg-rr", "fednova-rr")): (
        "The paper's mark says that its analysis covers sampling. The weights sum to one over each"
        " cohort, so a client's weight depends on who else was drawn; where the clients' weights"
        " differ, that moves the limit point."
    ),
    ("client sampling", ("fedshuffle-mvr", "mime")): (
        "The momentum is computed from gradients of the cohort that then trains with it. Where"
        " clients' weights differ, a cohort that moves further also has more weight in its own"
        " estimate. A shift is left, of a share 1 - b = 0.1 of each step of Mime and"
        " a (1 - a) = 0.09 of MVR (see [audit.md](audit.md)); it vanishes where all cohorts move"
        " equally far."
    ),
    ("reshuffling", ("fedlin", "mime")): (
        "The paper found no reshuffling in its authors' work. Here the order is a setting of the"
        " local work, and reshuffled unless a method requires another."
    ),
    ("unequal steps", ("mime",)): (
        "The paper found no analysis of it. With full participation all clients move in one"
        " direction, whose zero is the optimum, however many steps each takes."
    ),
    ("server step size", ("fedlin", "mime", "fedrr")): (
        "The paper found none in its authors' work. Here every method takes a server step size."
    ),
}

REASONS = {(m, name): why for (name, names), why in _REASONS.items() for m in names}
"""Why a mark here differs from the paper's, by method and characteristic."""

_HEAD = """# What each method can do

The paper's table of characteristics, for every method. No answer in it is typed: each comes from
running the method in the condition (`python -m fedshuffle.experiments.characteristics.page` writes
this page), and a test runs them all again and compares.

"""

_ASKED = """

A star marks an answer that differs from the paper's. An empty field is a no; a setting that a
method refuses is a no as well.

## What is asked

Clients have parabolas with different optima, and weights by size. A server optimiser is left out
where it is not in question, and a diagonal that rescales coordinates is divided out.

"""


def measured() -> dict[str, dict[str, bool]]:
    """The characteristics of all registered methods, by name."""
    return {method.name: characteristics(method) for method in methods.available()}


def paper(method: str) -> dict[str, bool]:
    """A method's row in the paper's table; empty if it has none.

    >>> paper("fedrr")["reshuffling"], paper("fedprox")
    (True, {})
    """
    return {name: mark == "y" for name, mark in zip(CHARACTERISTICS, PAPER.get(method, ""))}


def differences(found: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, str]]:
    """The marks that differ from the paper's, as (method, characteristic)."""
    return [
        (method, name)
        for method, marks in found.items()
        for name, said in paper(method).items()
        if marks[name] != said
    ]


def table(found: Mapping[str, Mapping[str, bool]]) -> str:
    """The characteristics as a Markdown table; a star marks a difference from the paper.

    >>> print(table({"mine": {"reshuffling": True, "unequal steps": False}}))
    | method | reshuffling | unequal steps |
    |---|:-:|:-:|
    | `mine` | yes |  |
    """
    names = list(next(iter(found.values())))
    other = set(differences(found))
    lines = [f"| method | {' | '.join(names)} |", f"|---{'|:-:' * len(names)}|"]
    for method, marks in found.items():
        words = {True: ("yes", "yes\\*"), False: ("", "no\\*")}
        cells = [words[marks[name]][(method, name) in other] for name in names]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(found: Mapping[str, Mapping[str, bool]]) -> str:
    """The whole page."""
    asked = [f"**{name}**: {inspect.getdoc(run)}" for name, run in CHARACTERISTICS.items()]
    reasons: dict[str, list[str]] = {}
    for method, name in differences(found):
        why = REASONS.get((method, name), "not known")
        reasons.setdefault(why, []).append(f"`{method}`, {name}")
    otherwise = [f"{'; '.join(cells)}. {text}" for text, cells in reasons.items()]
    differs = f"\n\n## Where the paper differs\n\n{_items(otherwise)}\n"
    return f"{_HEAD}{table(found)}{_ASKED}{_items(asked)}{differs}"


def _items(texts: list[str]) -> str:
    wrap = textwrap.TextWrapper(
        100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(f"- {' '.join(text.split())}") for text in texts)


if __name__ == "__main__":
    print(page(measured()), end="")
