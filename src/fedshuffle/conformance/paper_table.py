"""The table of characteristics beside the paper's, as a page.

``python -m fedshuffle.conformance.paper_table > docs/characteristics.md`` writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from fedshuffle import methods
from fedshuffle.conformance.characteristics import CHARACTERISTICS, characteristics

PAPER: dict[str, str] = {
    "fednova": "yyny nny",
    "fedlin": "ynny ynn",
    "mime": "yynn yyn",
    "fedrr": "ynyn nnn",
    "fedavg-rr": "yyyn nny",
    "fednova-rr": "yyyy nny",
    "fedshuffle": "yyyy nny",
    "fedshuffle-mvr": "yyyy yyy",
}
"""The paper's own table: yes or no for each characteristic, in order."""

_SUM_ONE = (
    "The paper's mark says that its analysis covers sampling. The weights sum to one over each"
    " cohort, so what a client counts depends on who else was drawn; where the clients' weights"
    " differ, that moves the resting point."
)
_SAME_COHORT = (
    "The momentum is made from gradients of the cohort that then walks along it. Where clients'"
    " weights differ, a cohort that moves further also counts more in its own estimate. A shift is"
    " left, of a share 1 - b = 0.1 of each step of Mime and a (1 - a) = 0.09 of MVR (see"
    " [audit.md](audit.md)); it vanishes where all cohorts move equally far."
)
_ORDER = (
    "The paper found no reshuffling in its authors' work. Here the order is a setting of the local"
    " work, and reshuffled unless a method insists on another."
)
_SERVER = "The paper found none in its authors' work. Here every method takes a server step size."

REASONS: dict[tuple[str, str], str] = {
    ("fednova", "client sampling"): _SUM_ONE,
    ("fedavg-rr", "client sampling"): _SUM_ONE,
    ("fednova-rr", "client sampling"): _SUM_ONE,
    ("fedshuffle-mvr", "client sampling"): _SAME_COHORT,
    ("mime", "client sampling"): _SAME_COHORT,
    ("fedlin", "reshuffling"): _ORDER,
    ("mime", "reshuffling"): _ORDER,
    ("mime", "unequal steps"): "The paper found no analysis of it. With full participation all"
    " clients walk along one direction, whose zero is the optimum, however many steps each takes.",
    ("fedlin", "server step size"): _SERVER,
    ("mime", "server step size"): _SERVER,
    ("fedrr", "server step size"): _SERVER,
}
"""Why a mark here is not the paper's."""

_HEAD = """# What each method can do

The paper's table of characteristics, for every method. No answer in it is typed: each was found by
running the method in the condition (`python -m fedshuffle.conformance.paper_table` writes this
page), and a test runs them all again and compares.
"""


def measured() -> dict[str, dict[str, bool]]:
    """The characteristics of all registered methods, by name."""
    return {method.name: characteristics(method) for method in methods.available()}


def paper(method: str) -> dict[str, bool] | None:
    """What the paper's table says of a method, if it is there.

    >>> paper("fedrr")["reshuffling"], paper("fedprox")
    (True, None)
    """
    if method not in PAPER:
        return None
    marks = PAPER[method].replace(" ", "")
    return {name: mark == "y" for name, mark in zip(CHARACTERISTICS, marks, strict=True)}


def differences(found: Mapping[str, Mapping[str, bool]]) -> list[tuple[str, str]]:
    """The marks that are not the paper's, as (method, characteristic)."""
    return [
        (method, name)
        for method, marks in found.items()
        for name, said in (paper(method) or {}).items()
        if marks[name] != said
    ]


def table(found: Mapping[str, Mapping[str, bool]]) -> str:
    """The characteristics as a Markdown table; a star marks what is not as in the paper.

    >>> print(table({"mine": {"reshuffling": True, "unequal steps": False}}))
    | method | reshuffling | unequal steps |
    |---|:-:|:-:|
    | `mine` | yes |  |
    """
    names = list(next(iter(found.values())))
    other = set(differences(found))
    lines = [f"| method | {' | '.join(names)} |", f"|---{'|:-:' * len(names)}|"]
    for method, marks in found.items():
        cells = [
            ("yes" if marks[name] else "no" if (method, name) in other else "")
            + ("\\*" if (method, name) in other else "")
            for name in names
        ]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(found: Mapping[str, Mapping[str, bool]]) -> str:
    """The whole page."""
    asked = []
    for name, run in CHARACTERISTICS.items():
        text = " ".join((inspect.getdoc(run) or "").split())
        asked.append(f"- **{name}**: {text}")
    reasons: dict[str, list[str]] = {}
    for method, name in differences(found):
        why = REASONS.get((method, name), "not known")
        reasons.setdefault(why, []).append(f"`{method}`, {name}")
    otherwise = [f"- {'; '.join(cells)}. {text}" for text, cells in reasons.items()]
    parts = [
        _HEAD,
        table(found),
        "\nA star marks an answer that is not the paper's. An empty field is a no; a setting that a"
        " method refuses is a no as well.\n",
        "## What is asked\n",
        "Clients have parabolas with different optima, and weights by size. A server optimiser is"
        " left out where\nit is not in question, and a diagonal that rescales coordinates is"
        " divided out.\n",
        *asked,
        "\n## Where the paper says otherwise\n",
        *otherwise,
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(measured()), end="")
