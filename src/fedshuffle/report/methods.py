"""All methods for a person: by family, what each costs, its options, and when it is consistent.

Whether a method is consistent is not written down anywhere: it is audited on a small federation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

from rich.console import Console
from rich.text import Text

from fedshuffle import methods
from fedshuffle.auditing import audit
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, MissLast
from fedshuffle.methods import Method, options
from fedshuffle.sampling import Full, Sampling, Table

# Four clients on which every cause of a bias shows: batches of two make the steps (1, 1, 2, 3),
# which are not proportional to the sizes.
CLIENTS = Federation.from_sizes([1, 2, 4, 5])

_EVERYBODY = Full(4)
# Uniform sampling of two. Written out, all sums over cohorts are finite, and the audit is quick.
_PAIRS = Table(4, [(pair, 1 / 6) for pair in itertools.combinations(range(4), 2)])

CONDITIONS: dict[str, tuple[Sampling, LocalWork]] = {
    "uneven_steps": (_EVERYBODY, LocalWork(batch_size=2)),
    "client_sampling": (_PAIRS, LocalWork(batch_size=2)),
    "unfinished_work": (_EVERYBODY, LocalWork(batch_size=2, interruption=MissLast())),
}
_DRAWS = 2048
"""For a method without a formula, whose audit plays it."""

OWN = "yours"
"""The family of methods that the user has registered."""


@final
@dataclass(frozen=True)
class Family:
    """Methods that belong together and share a page of the documentation."""

    page: str
    title: str
    names: tuple[str, ...]


def _family(page: str, title: str, members: Iterable[Method]) -> Family:
    return Family(page, title, tuple(method.name for method in members))


_SHUFFLES = methods.fedshuffle.METHODS
FAMILIES = (
    _family("fedavg", "FedAvg", methods.fedavg.METHODS),
    _family("fednova", "FedNova", methods.fednova.METHODS),
    _family("fedshuffle", "FedShuffle", (m for m in _SHUFFLES if not m.balanced_only)),
    _family("fedrr-nastya", "FedRR and NASTYA", (m for m in _SHUFFLES if m.balanced_only)),
    _family("capped", "Between FedNova and FedShuffle", methods.capped.METHODS),
    _family("fedprox", "FedProx", methods.fedprox.METHODS),
    _family("scaffold", "SCAFFOLD", methods.scaffold.METHODS),
    _family("vrl-sgd", "VRL-SGD", methods.vrl_sgd.METHODS),
    _family("fedlin", "FedLin", methods.fedlin.METHODS),
    _family("mime", "Mime", methods.mime.METHODS),
    _family("adaptive", "Optimisers at the server", methods.adaptive.METHODS),
    _family("baselines", "Baselines", methods.baselines.METHODS),
)


def families() -> list[Family]:
    """The families of all registered methods; those that the user registered are the last."""
    known = {name for family in FAMILIES for name in family.names}
    own = tuple(m.name for m in methods.available() if m.name not in known)
    return [*FAMILIES, *([Family(OWN, "Your own", own)] if own else [])]


def describe(method: Method) -> dict[str, Any]:
    """Plain data about a method: what it is made of and costs, and when it is consistent."""
    family = next((f.page for f in families() if method.name in f.names), OWN)
    return {
        "name": method.name,
        "family": family,
        "summary": method.summary,
        "reference": method.reference,
        **method.averaging.describe(),
        "momentum": method.momentum,
        "direction": repr(method.direction),
        "server": repr(method.server),
        "work": dict(method.work),
        "options": options.values([method.direction, method.server, method.averaging]),
        "costs": costs(method),
        "client_state": method.direction.client_state,
        "consistent": {name: consistent(method, name) for name in CONDITIONS},
    }


def costs(method: Method) -> dict[str, float]:
    """What a client of the cohort sends, receives and computes in a round."""
    direction = method.direction
    sent = not method.pooled  # where there are no clients, nothing is sent
    return {
        "messages": 2 * direction.trips * sent,
        "vectors_down": direction.down * sent,
        "vectors_up": direction.up * sent,
        "gradients_per_step": direction.gradients_per_step,
        "full_gradients": direction.full_gradients,
    }


def consistent(method: Method, condition: str) -> bool | None:
    """Whether the audit finds the method consistent; None where it is not defined, or where the
    audit had to sample and saw no difference.
    """
    sampling, work = CONDITIONS[condition]
    try:
        return audit(CLIENTS, method, sampling, work, draws=_DRAWS).consistent
    except FedShuffleError:
        return None


def everything() -> list[dict[str, Any]]:
    """All methods as plain data, family by family."""
    return [describe(methods.get(name)) for family in families() for name in family.names]


# For a terminal ------------------------------------------------------------------------------

_MARKS = {True: ("yes", "green"), False: ("no", "red"), None: ("-", "dim")}


def print_methods(console: Console) -> None:
    """Print all methods, family by family, two or three lines each."""
    rows = everything()
    width = max(len(row["name"]) for row in rows) + 1
    console.print(Text(f"{'':{width}}         vectors  keeps  consistent if", "dim"))
    console.print(Text(f"{'method':{width}} msgs  down   up  state  all  some  cut", "dim"))
    titles = {family.page: family.title for family in families()}
    for page, members in itertools.groupby(rows, key=lambda row: row["family"]):
        console.print()
        console.print(Text(titles[page], "bold underline"))
        for row in members:
            console.print(_line(row, width), soft_wrap=True)
            console.print(Text(f"    {row['summary']}"), soft_wrap=True)
            if row["options"]:
                console.print(Text(f"    options: {_options(row)}", "dim"), soft_wrap=True)
    console.print(
        "\n[dim]Messages (both ways) and vectors of the model's size are per client of the cohort"
        " and round. Consistent: the audit, on clients of unequal sizes, finds the objective you"
        " meant if all take part, if some do (two of four, uniformly), or if work is cut short"
        " (clients miss their last step); '-' means not defined there. Options go behind the name:"
        " fedprox:mu=0.1. scaffold+fedshuffle is scaffold with fedshuffle's averaging. Methods"
        " without a direction of their own also take --momentum mvr:A or global:A.[/]",
        highlight=False,
    )


def _line(row: dict[str, Any], width: int) -> Text:
    cost = row["costs"]
    line = Text(f"{row['name']:{width}}", "bold")
    numbers = f"{cost['messages']:5g}  {cost['vectors_down']:4g}  {cost['vectors_up']:3g}"
    line.append(f"{numbers}  {'yes' if row['client_state'] else 'no':>5}", "not bold")
    for condition, gap in zip(CONDITIONS, (5, 6, 5), strict=True):
        word, style = _MARKS[row["consistent"][condition]]
        line.append(f"{word:>{gap}}", f"not bold {style}")
    return line.append(f"  {row['reference']}", "not bold dim")


def _options(row: dict[str, Any]) -> str:
    return ", ".join(f"{k}={_plain(v)}" for k, v in row["options"].items())


def _plain(value: Any) -> str:
    """A value as it is written behind a method's name."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


# For the documentation -----------------------------------------------------------------------


def markdown(page: str | None = None) -> str:
    """The methods of a page of ``docs/methods`` as a table, or those of all with links."""
    rows = [
        "| method | what it is | messages | vectors down, up | keeps state | consistent: all, some,"
        " cut | options | reference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        if page in (None, family.page):
            for name in family.names:
                facts = describe(methods.get(name))
                shown = f"`{name}`" if page else f"[`{name}`]({family.page}.md)"
                rows.append(f"| {shown} | {' | '.join(_cells(facts))} |")
    return "\n".join(rows)


def _cells(facts: dict[str, Any]) -> list[str]:
    cost = facts["costs"]
    return [
        facts["summary"],
        f"{cost['messages']:g}",
        f"{cost['vectors_down']:g}, {cost['vectors_up']:g}",
        "yes" if facts["client_state"] else "no",
        ", ".join(_MARKS[facts["consistent"][condition]][0] for condition in CONDITIONS),
        ", ".join(f"`{k}={_plain(v)}`" for k, v in facts["options"].items()) or "none",
        facts["reference"],
    ]
