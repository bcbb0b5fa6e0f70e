r"""The privacy audit: is a server as private as it says?

A server that clips updates to the norm :math:`C` and adds Gaussian noise of standard deviation
:math:`\sigma` to each coordinate of the model has the noise multiplier

.. math:: z = \sigma / \Delta,

where the sensitivity :math:`\Delta` is the largest distance by which one client can move the model.
With aggregation weights :math:`a_i` it is :math:`C \max_i a_i`. That is how accountants define z,
so a server that claims a larger one spends more privacy than it reports. Both are measured by
sending updates that are known; docs/how-to/audit-your-code.md says how.

Which change of one client is meant is the *neighbouring relation*:

- ``zero-out``: its update becomes zero. The weakest of the three, and what is judged by default.
- ``remove``: it does not reply. The same, unless the server divides by a sum over the replies: then
  the others count more without it, and the distance doubles.
- ``replace``: its update becomes any other one. Twice as far as zero-out.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedshuffle._arrays import IntArray, count, expect, jsonable, number
from fedshuffle.auditing.adapters import Aggregator, as_aggregator, check_not_by_updates
from fedshuffle.auditing.findings import Finding, findings_of
from fedshuffle.auditing.privacy_probes import AdaptiveThreshold, Measured, PrivateServer, measure
from fedshuffle.auditing.result import print_conclusion
from fedshuffle.errors import FedShuffleError, check_known, visible
from fedshuffle.federation import Federation
from fedshuffle.randomness import check_seed
from fedshuffle.sampling import Sampling, resolve

if TYPE_CHECKING:
    from rich.console import Console

Neighbours = Literal["zero-out", "remove", "replace"]
NEIGHBOURS: tuple[Neighbours, ...] = ("zero-out", "remove", "replace")

_SURE = 5.0  # standard errors needed to call a number wrong
_CLOSE = 0.01  # the relative distance within which a server's noise is that of a formula
_RESOLVED = 0.05  # an interval that reaches this far below the claim leaves it undecided


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PrivacyAudit:
    """What one client can do to the model, the noise that hides it, and what was claimed."""

    name: str
    source: str  # which clients took part
    claimed: float | None  # the noise multiplier that the server says it has
    neighbours: Neighbours  # what one client may change
    holds: bool | None  # whether the server keeps its claim; None if undecided
    noise_multiplier: float
    interval: tuple[float, float]
    confidence: float
    noise: float  # standard deviation on each coordinate of the model
    sensitivity: Mapping[str, float | None]  # by neighbouring relation; None if not measured
    client: Hashable  # the client that moves the model furthest
    weight: float  # its aggregation weight
    clip: float  # the norm at which its update is clipped; NaN if noise hides it
    cohort: IntArray  # the clients among which that is so
    how: str
    threshold: AdaptiveThreshold | None  # None if it is fixed
    findings: tuple[Finding, ...]

    @property
    def conclusion(self) -> tuple[str, str]:
        """The conclusion in a word or two, and a sentence that explains it."""
        low, high = self.interval
        claim = "no claim was given" if self.claimed is None else f"{self.claimed:.4g} is claimed"
        word = {True: "holds", False: "does not hold", None: "undecided"}[self.holds]
        if self.threshold is not None and (self.threshold.inverted or self.threshold.runs_away):
            claim += ", and the threshold does not settle"
        return word, (
            f"the real noise multiplier is {self.noise_multiplier:.3g} ({low:.3g} to {high:.3g} at"
            f" {self.confidence:.0%}), {claim}."
        )

    def __repr__(self) -> str:
        return f"<privacy of {self.name}, {self.source}: {': '.join(self.conclusion)}>"

    def __str__(self) -> str:
        from fedshuffle._terminal import Console

        console = Console(width=100, highlight=False)
        with console.capture() as text:
            print_privacy(console, self)
        return text.get()

    def facts(self) -> list[str]:
        """What was measured, as sentences."""
        client, clips = visible(str(self.client)), np.isfinite(self.clip)
        facts = [
            f"noise of standard deviation {self.noise:.4g} on each coordinate",
            f"client {client} counts most: {self.weight:.4g} of its update",
            *([f"updates are clipped at {self.clip:.4g}"] if clips else []),
        ]
        if (found := self.threshold) is not None:
            last, rounds = found.values[-1], len(found.values)
            facts.append(
                f"the threshold adapts: {found.values[0]:.3g} at first, {last:.3g} after {rounds}"
                f" rounds; then {found.unclipped[rounds // 2 :].mean():.0%} of updates are within"
                " it"
            )
        return facts

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; null for what is infinite."""
        data = dataclasses.asdict(self) | {"client": str(self.client)}
        plain: dict[str, Any] = jsonable(data)
        return plain


def audit_privacy(
    aggregate: Aggregator | Callable[..., Any],
    federation: Federation,
    sampling: str | Sampling = "full",
    *,
    clip: float,
    noise_multiplier: float | None = None,
    neighbours: Neighbours = "zero-out",
    rounds: int = 100,
    repeats: int = 400,
    seed: int = 0,
    confidence: float = 0.95,
) -> PrivacyAudit:
    """How private a server really is, measured by sending it known updates.

    Args:
        aggregate: a function ``(clients, sizes, updates) -> step``, a class of such, or an adapter
            from :mod:`fedshuffle.auditing.adapters`.
        federation: the clients.
        sampling: how cohorts are drawn.
        clip: the clipping norm that the server says it has, the first one if it adapts.
        noise_multiplier: the one that the server says it has.
        neighbours: what one client may change: ``"zero-out"``, ``"remove"`` or ``"replace"``.
        rounds: in which an adaptive threshold is followed.
        repeats: measurements to average where the server's noise cannot be made to cancel.
        seed: of the cohorts, and of the global generators while the server runs.
        confidence: of the interval.

    >>> def server(clients, sizes, updates):
    ...     updates = updates / np.maximum(1, np.linalg.norm(updates, axis=1, keepdims=True))
    ...     return sizes / sizes.sum() @ updates + np.random.normal(0, 1 / 3, updates.shape[1])
    >>> result = audit_privacy(server, Federation.from_sizes([1, 2, 6]), clip=1, noise_multiplier=1)
    >>> result.holds, round(result.noise_multiplier, 2), round(result.sensitivity["zero-out"], 4)
    (False, 0.5, 0.6667)
    """
    expect(federation, Federation, "federation")
    number(clip, "clip", within="(0, inf)")
    number(confidence, "confidence", within="(0, 1)")
    if noise_multiplier is not None:
        number(noise_multiplier, "noise_multiplier", within="(0, inf)")
    check_known("neighbours", neighbours, NEIGHBOURS)
    drawn = resolve(sampling, federation)
    check_not_by_updates(drawn)
    server = PrivateServer(
        as_aggregator(aggregate),
        federation,
        drawn,
        float(clip),
        count(rounds, "rounds", least=10),
        count(repeats, "repeats", least=20),
        check_seed(seed),
    )
    found = measure(server)
    if (change := found.changes[neighbours]) is None:
        raise FedShuffleError(
            f"{server.aggregator.name} gives no step without client {found.client}, so its"
            " sensitivity to a removal cannot be measured: use neighbours='zero-out'."
        )
    distance, error = change
    low, high = _interval(found, distance, error, confidence)
    multiplier = found.noise / distance
    findings, wrong = _findings(found, clip, noise_multiplier, multiplier, (low, high), change)
    enough = noise_multiplier is not None and low >= noise_multiplier * (1 - _RESOLVED)
    averaged = f", {repeats} measurements averaged" if error else ", noise cancelled"
    return PrivacyAudit(
        name=server.aggregator.name,
        source=f"sampling {drawn!r}",
        claimed=noise_multiplier,
        neighbours=neighbours,
        holds=False if wrong else (True if enough else None),
        noise_multiplier=multiplier,
        interval=(low, high),
        confidence=confidence,
        noise=found.noise,
        sensitivity={name: pair and pair[0] for name, pair in found.changes.items()},
        client=found.client,
        weight=found.weight,
        clip=found.clip,
        cohort=found.cohort,
        how=f"{found.probed} of {len(federation)} clients probed{averaged}",
        threshold=found.threshold,
        findings=tuple(findings),
    )


def _interval(
    found: Measured, distance: float, error: float, confidence: float
) -> tuple[float, float]:
    """The interval of the noise multiplier: chi-square for the noise, normal for the distance;
    each misses half as often if both are estimates.
    """
    from scipy.special import chdtri, ndtri

    if not found.noise:
        return 0.0, 0.0
    miss = (1 - confidence) / (4 if error else 2)
    reach = float(ndtri(1 - miss)) * error if error else 0.0
    # chdtri gives the point that a chi-square variable exceeds with this probability.
    low, high = (
        found.noise * (found.freedom / chdtri(found.freedom, p)) ** 0.5 for p in (miss, 1 - miss)
    )
    nearest = distance - reach
    return float(low / (distance + reach)), float(high / nearest) if nearest > 0 else np.inf


def _findings(
    found: Measured,
    clip: float,
    claim: float | None,
    multiplier: float,
    interval: tuple[float, float],
    change: tuple[float, float],
) -> tuple[list[Finding], bool]:
    """What is wrong, and whether it breaks the claim."""
    b, threshold = len(found.cohort), found.threshold
    relative = np.hypot(change[1] / change[0], (2 * found.freedom) ** -0.5)
    small = claim is not None and max(interval[1], multiplier * (1 + _SURE * relative)) < claim
    bounded, noisy = np.isfinite(change[0]), found.noise > 0
    # The noise of a server that takes all clients to count alike.
    by_number = claim is not None and abs(found.noise * b / (claim * clip) - 1) < _CLOSE
    by_number &= found.weight * b > 1 + _CLOSE
    inverted = threshold is not None and threshold.inverted
    wrong = {
        "not clipped": not bounded,
        "no noise": not noisy,
        "noise by number": bounded and noisy and small and by_number,
        "noise too small": bounded and noisy and small and not by_number,
        "inverted threshold": inverted,
        "runaway threshold": threshold is not None and threshold.runs_away and not inverted,
    }
    removed, zeroed = found.changes["remove"], found.changes["zero-out"]
    assert zeroed is not None
    farther = removed is not None and removed[0] > zeroed[0] * (1 + _CLOSE) + _SURE * removed[1]
    values = {
        "multiplier": multiplier,
        "claim": claim,
        "number": b,
        "noise": found.noise,
        "distance": change[0],
        "client": visible(str(found.client)),
        "weight": found.weight,
        "farther": removed[0] / zeroed[0] if removed is not None else 0.0,
        "first": None if threshold is None else threshold.values[0],
        "last": None if threshold is None else threshold.values[-1],
    }
    return findings_of(wrong | {"removal": farther and bounded}, **values), any(wrong.values())


def print_privacy(console: "Console", audit: PrivacyAudit) -> None:
    """Print the sensitivity, the noise, the conclusion, and what to change."""
    from rich.markup import escape

    from fedshuffle._terminal import plain_table

    console.print(f"[bold]{escape(audit.name)}[/], {escape(audit.source)}", highlight=False)
    table = plain_table("one client's update", "moves the model", "noise multiplier", align="lrr")
    words = {"zero-out": "becomes zero", "remove": "is missing", "replace": "becomes another"}
    for name, word in words.items():
        distance = audit.sensitivity[name]
        mark = " (judged)" if name == audit.neighbours else ""
        cells = (
            ("?", "?") if distance is None else (f"{distance:.4g}", f"{audit.noise / distance:.3g}")
        )
        table.add_row(f"{word}{mark}", *cells)
    console.print(table)
    print_conclusion(console, audit.how, audit.conclusion, audit.facts(), audit.findings)
