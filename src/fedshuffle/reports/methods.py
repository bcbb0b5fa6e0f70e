"""All methods by family: what each costs, its options, and when it is consistent.

Whether a method is consistent is not written down anywhere: it is audited on a small federation.
"""

import itertools
from typing import Any

from fedshuffle import methods
from fedshuffle.auditing import audit
from fedshuffle.errors import FedShuffleError
from fedshuffle.federation import Federation
from fedshuffle.local_work import LocalWork, MissLast
from fedshuffle.methods import Family, Method, options
from fedshuffle.sampling import Full, Listed, Sampling

# Four clients on which every cause of a bias shows: batches of two make the steps (1, 1, 2, 3),
# which are not proportional to the sizes.
CLIENTS = Federation.from_sizes([1, 2, 4, 5])

_EVERYBODY = Full(4)
# Uniform sampling of two. Written out, all sums over cohorts are finite, and the audit is quick.
_PAIRS = Listed(4, [(pair, 1 / 6) for pair in itertools.combinations(range(4), 2)])

CONDITIONS: dict[str, tuple[Sampling, LocalWork]] = {
    "uneven_steps": (_EVERYBODY, LocalWork(batch_size=2)),
    "client_sampling": (_PAIRS, LocalWork(batch_size=2)),
    "unfinished_work": (_EVERYBODY, LocalWork(batch_size=2, interruption=MissLast())),
}
_DRAWS = 2048  # simulated cohorts for a method without a closed form

OWN = Family("yours", "Your own", {})  # the family of methods that the user has registered


def family(method: Method) -> Family:
    """The family of a method of the library; a renamed copy of one is the user's."""
    known = method.family
    return known if known and method.name in known.styles else OWN


def describe(method: Method) -> dict[str, Any]:
    """Plain data about a method: what it is made of, when it is consistent, and what a client of
    the cohort sends, receives and computes in a round.
    """
    direction = method.direction
    sent = not method.pooled  # where there are no clients, nothing is sent
    return {
        "name": method.name,
        "family": family(method).page,
        "summary": method.summary,
        "reference": method.reference,
        **method.averaging.describe(),
        "momentum": method.momentum,
        "direction": repr(direction),
        "server": repr(method.server),
        "work": dict(method.work),
        "options": options.values([direction, method.server, method.averaging]),
        "costs": {
            "messages": 2 * direction.trips * sent,
            "vectors_down": direction.down * sent,
            "vectors_up": direction.up * sent,
            "gradients_per_step": direction.gradients_per_step,
            "full_gradients": direction.full_gradients,
        },
        "client_state": direction.client_state,
        "consistent": {name: _consistent(method, *under) for name, under in CONDITIONS.items()},
    }


def _consistent(method: Method, sampling: Sampling, work: LocalWork) -> bool | None:
    """Whether the audit finds the method consistent; None where it is not defined, or where the
    audit had to sample and saw no difference.
    """
    try:
        return audit(CLIENTS, method, sampling, method.drop_fixed(work), draws=_DRAWS).consistent
    except FedShuffleError:
        return None


def everything() -> list[dict[str, Any]]:
    """All methods as plain data, family by family; those that the user registered are the last."""
    return [describe(method) for method in methods.available()]


MARKS = {True: "yes", False: "no", None: "-"}  # whether a method is consistent


def options_text(row: dict[str, Any]) -> str:
    """The options of a method and their values."""
    return ", ".join(f"{k}={_plain(v)}" for k, v in row["options"].items())


def _plain(value: Any) -> str:
    """A value as it is written behind a method's name."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def costs_text(row: dict[str, Any]) -> str:
    """What a client of the cohort receives, sends and keeps per round, in vectors of the model."""
    costs = row["costs"]
    if not costs["messages"]:
        return "none"
    parts = [f"{costs['vectors_down']:g}/{costs['vectors_up']:g}"]
    if costs["messages"] > 2:
        parts.append(f"{costs['messages']:g} messages")
    if row["client_state"]:
        parts.append("state")
    return ", ".join(parts)


def markdown() -> str:
    """The table of all methods in ``docs/explanation/methods``, with links to their pages."""
    heads = "method | consistent: all, some, cut | vectors down/up | what it is"
    rows = [f"| {heads} |", "|---|---|---|---|"]
    for facts in everything():
        if facts["family"] != OWN.page:
            name = f"[`{facts['name']}`]({facts['family']}.md)"
            found = ", ".join(MARKS[answer] for answer in facts["consistent"].values())
            rows.append(f"| {name} | {found} | {costs_text(facts)} | {facts['summary']} |")
    return "\n".join(rows)
