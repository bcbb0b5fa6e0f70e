"""What every audit reports, as data, for the terminal, for a notebook and as a picture."""

import dataclasses
import html
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, jsonable
from fedshuffle.auditing.estimation import WeightEstimate
from fedshuffle.auditing.findings import CLOSE, TOLERANCE, Finding
from fedshuffle.auditing.server_properties import ServerProperties
from fedshuffle.errors import visible
from fedshuffle.federation import Federation
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

    from fedshuffle.auditing.over_time import Window

_ROUNDING = 1e-8  # the smallest relative width of an interval: servers and expectations round
_SURE = 5.0  # standard errors needed to call a weight wrong; corrects for testing many clients
_ROWS = 24  # larger federations are shown in groups of clients instead of client by client
_GROUPS = 10
_COLOURS = dict.fromkeys(("consistent", "holds"), "green")
_COLOURS |= dict.fromkeys(("not consistent", "does not hold"), "red")
_Row = tuple[str, str, str, str, str, float]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Audit:
    """The objective that a method or a server really minimises, and the one you meant.

    >>> from fedshuffle import Federation, audit
    >>> result = audit(Federation.from_sizes([1, 3]), "fedavg")
    >>> result.effective_weights.round(3).tolist(), result.consistent
    ([0.1, 0.9], False)
    """

    name: str  # the audited method, server or log
    source: str  # which clients took part: the sampling, or the log
    client_ids: Sequence[Hashable]
    sizes: IntArray  # examples of each client
    objective_weights: FloatArray
    effective_weights: FloatArray
    inclusion_probabilities: FloatArray  # for a log, shares of rounds
    consistent: bool | None  # whether the two objectives are the same; None if undecided
    exact: bool
    how: str  # how the weights were found
    standard_errors: FloatArray | None  # infinite for a client never seen; None if exact
    findings: tuple[Finding, ...]  # what is wrong, why it matters and how to fix it
    method: Method | None = None  # None for a server or a log
    sampling: Sampling | None = None  # None for a log
    rounds: int | None = None  # rounds from 0 on that were averaged, if a method's rounds differ
    intervals: FloatArray | None = None  # of a server or a log: lower and upper ends, per client
    confidence: float | None = None  # of each interval
    properties: ServerProperties = ServerProperties()  # noqa: RUF009
    """How a server or the system of a log behaves; all unknown for a method."""
    windows: "tuple[Window, ...]" = ()  # of a log: who counts in its quarters
    notes: tuple[str, ...] = ()  # what transforms do without harm
    keeps_mean: bool | None = True  # whether transforms keep the mean update; None if it depends
    optimiser: str = "sgd"  # what makes local steps of gradients
    adaptive: str = ""  # "equal" or "unequal" numbers of steps of an adaptive one

    def facts(self) -> list[str]:
        """What is no fault, as sentences."""
        return [*self.properties.facts(), *self.notes]

    @property
    def total_variation(self) -> float:
        """``1/2 sum_i |w-hat_i - w_i|``: the share of the objective that is in the wrong place."""
        return 0.5 * float(np.abs(self.effective_weights - self.objective_weights).sum())

    @property
    def ratios(self) -> FloatArray:
        """``w-hat_i / w_i``: how many times what was meant each client counts; 1 is right."""
        return self.effective_weights / self.objective_weights

    @property
    def largest_ratio(self) -> float:
        """The largest factor between what a client counts and what it should, either way;
        infinite where a client does not count at all.
        """
        return float(self._factors.max())

    @property
    def _factors(self) -> FloatArray:
        ratios, errors = self.ratios, self.standard_errors
        with np.errstate(divide="ignore"):
            factors: FloatArray = np.maximum(ratios, 1 / np.maximum(ratios, 0.0))
        if errors is not None:  # nothing is known of a client that was never drawn
            factors[(ratios <= 0) & (errors != 0)] = 0.0
        return factors

    @property
    def gaining(self) -> IntArray:
        """Clients that count more than they should, most first."""
        return np.argsort(-self.ratios, kind="stable")[: (self.ratios > 1 + TOLERANCE).sum()]

    @property
    def losing(self) -> IntArray:
        """Clients that count less than they should, most first."""
        return np.argsort(self.ratios, kind="stable")[: (self.ratios < 1 - TOLERANCE).sum()]

    @property
    def conclusion(self) -> tuple[str, str]:
        """The conclusion in a word or two, and a sentence that explains it."""
        if self.consistent:
            return "consistent", "it minimises the objective you meant."
        if self.adaptive == "unequal":
            told = "unequal numbers of adaptive steps minimise no weighted objective."
            return "not consistent", told
        if self.consistent is None:
            if self.adaptive:
                return "undecided", "each client rescales its gradients: it depends on these."
            if self.keeps_mean is None:
                return "undecided", "a transform may cut the weight of clients with long updates."
            if self.standard_errors is None:
                return "undecided", f"no bias was seen ({self.how}), but rounds differ."
            return "undecided", "no bias larger than the sampling error was seen."
        if self.keeps_mean is False and self.total_variation <= TOLERANCE:
            return "not consistent", "a transform changes the mean update."
        i = int(self._factors.argmax())
        return "not consistent", (
            f"{self.total_variation:.2%} of the objective is in the wrong place; client"
            f" {visible(str(self.client_ids[i]))} counts {self.ratios[i]:.3g} times what you meant"
            f" ({len(self.gaining)} gain, {len(self.losing)} lose)."
        )

    def __repr__(self) -> str:
        word, sentence = self.conclusion
        return f"<{self.name} on {len(self.sizes)} clients, {self.source}: {word}: {sentence}>"

    def _repr_html_(self) -> str:
        """The table, the conclusion and the findings, for a notebook."""
        from fedshuffle._terminal import html_table

        safe = html.escape
        columns, rows = _table(self)
        marks = [("▸" if ratio > 1 else "◂") * _length(ratio) for *_, ratio in rows]
        cells = [(*row[:-1], f"{row[-1]:.3f}", mark) for row, mark in zip(rows, marks, strict=True)]
        word, sentence = self.conclusion
        items = [safe(fact) for fact in self.facts()]
        for finding in self.findings:
            what, why, fix = map(safe, (finding.what, finding.why, finding.fix))
            items.append(f"<b>{what}</b> {why} <i>Fix:</i> {fix}")
        about = f"<b>{safe(self.name)}</b> on {len(self.sizes)} clients, {safe(self.source)}"
        return (
            f"<div><p>{about}</p>{html_table((*columns, ''), cells)}"
            f"<p>{safe(_how(self))}<br><b>{word}</b>: {safe(sentence)}</p>"
            f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul></div>"
        )

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw how much each client counts beside how much you meant it to, as bars.

        Above each pair stands the factor between the two; thin lines are intervals, or two
        standard errors. More than 24 clients are drawn in groups by size. Without axes the bars
        get a new figure, which a notebook shows; in a script, call
        ``ax.figure.savefig("audit.png")``.
        """
        from fedshuffle.auditing.picture import draw

        return draw(self, ax)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; null for what is infinite."""
        audited: dict[str, Any]
        if self.method is not None:
            audited = {"method": self.method.name, "momentum": self.method.momentum}
            audited |= {"sampling": repr(self.sampling), "rounds": self.rounds}
        else:
            fields = ("name", "source", "intervals", "confidence")
            audited = {name: getattr(self, name) for name in fields}
            audited["properties"] = dataclasses.asdict(self.properties)
            if self.source.startswith("a log"):
                audited["windows"] = [dataclasses.asdict(window) for window in self.windows]
        names = (
            *("objective_weights", "effective_weights", "inclusion_probabilities"),
            *("total_variation", "largest_ratio", "consistent", "exact", "how"),
            *("standard_errors", "gaining", "losing", "notes", "keeps_mean"),
            *("optimiser", "adaptive"),
        )
        data = {
            **audited,
            "client_ids": [i if isinstance(i, int | str) else str(i) for i in self.client_ids],
            **{name: getattr(self, name) for name in names},
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }
        plain: dict[str, Any] = jsonable(data)
        return plain


def print_audit(console: "Console", audit: Audit) -> None:
    """Print how much each client counts, the conclusion, and what to change."""
    from rich.markup import escape

    from fedshuffle._terminal import plain_table

    about = f" on {len(audit.sizes)} clients, {audit.source}"
    console.print(f"[bold]{escape(audit.name)}[/]{escape(about)}", highlight=False)
    columns, rows = _table(audit)
    table = plain_table(*columns, align="rrrrr")
    for *cells, ratio in rows:
        table.add_row(*map(escape, cells), _bar(ratio))
    console.print(table)
    print_conclusion(console, _how(audit), audit.conclusion, audit.facts(), audit.findings)


def print_conclusion(
    console: "Console",
    how: str,
    conclusion: tuple[str, str],
    facts: Sequence[str],
    findings: Sequence[Finding],
) -> None:
    """Print how an audit was made, what it concludes, and what is wrong."""
    from rich.markup import escape
    from rich.padding import Padding

    word, sentence = conclusion
    style = f"bold {_COLOURS.get(word, '')}".strip()
    console.print(f"\n[dim]{escape(how)}[/]", highlight=False)
    console.print(f"[{style}]{word}[/]: {escape(sentence)}", highlight=False)
    for fact in facts:
        console.print(f"[dim]-[/] {escape(fact)}", highlight=False)
    for finding in findings:
        console.print(f"\n[bold yellow]![/] {escape(finding.what)}", highlight=False)
        text = f"{escape(finding.why)}\n[green]Fix:[/] {escape(finding.fix)}"
        console.print(Padding(text, (0, 0, 0, 2)))


def groups_by_size(audit: Audit) -> tuple[list[str], list[IntArray]]:
    """The clients one by one, with their names, or groups of clients, with their sizes.

    There is a group for each size, or, if sizes are many, ten groups of as many clients.
    """
    order = np.argsort(audit.sizes, kind="stable")
    if len(order) <= _ROWS:
        return [str(i) for i in audit.client_ids], np.split(np.arange(len(order)), len(order))
    starts = np.flatnonzero(np.diff(audit.sizes[order])) + 1
    groups = np.split(order, starts) if len(starts) < _GROUPS else np.array_split(order, _GROUPS)
    return [_sizes(audit.sizes[members]) for members in groups], groups


def _sizes(sizes: IntArray) -> str:
    small, large = sizes.min(), sizes.max()
    return f"{small}" if small == large else f"{small} to {large}"


def _table(audit: Audit) -> tuple[tuple[str, ...], list[_Row]]:
    """The columns, and a row for every client, or for groups of clients by size."""
    each = len(audit.sizes) <= _ROWS
    rows: list[_Row] = []
    for name, members in zip(*groups_by_size(audit), strict=True):
        meant = float(audit.objective_weights[members].sum())
        really, margin = float(audit.effective_weights[members].sum()), ""
        if each and audit.intervals is not None and audit.standard_errors is not None:
            low, high = audit.intervals[members[0]]
            margin = f" ± {(high - low) / 2:.2%}" if np.isfinite(high) else " ± ?"
        row = (
            name if each else f"{len(members)}",
            _sizes(audit.sizes[members]),
            f"{audit.inclusion_probabilities[members].mean():.3g}",
            f"{meant:.2%}",
            f"{really:.2%}{margin}",
            really / meant,
        )
        rows.append(row)
    heading = "client" if each else "clients"
    return (heading, "examples", "takes part", "you meant", "really", "really / meant"), rows


def _length(ratio: float) -> int:
    """The length of the bar of a ratio, from 0 to 8: four for every doubling or halving."""
    return round(min(8.0, 4 * abs(float(np.log2(ratio))))) if ratio > 0 else 8


def _bar(ratio: float) -> str:
    """The ratio with a bar: to the right for more than was meant, to the left for less."""
    length = _length(ratio)
    bar = f"{'#' * length:>8}|{'':8}" if ratio < 1 else f"{'':8}|{'#' * length}"
    colour = "dim" if length == 0 else ("red" if ratio > 1 else "blue")
    return f"{ratio:6.3f}  [{colour}]{bar}[/]"


def _how(audit: Audit) -> str:
    how, errors = "exact" if audit.exact else "estimated", audit.standard_errors
    if errors is not None:  # of the clients about which anything is known
        largest = float(errors[np.isfinite(errors)].max(initial=0.0))
        how += f", standard error up to {largest:.1g}"
    return f"{how} ({audit.how})"


def blackbox_result(
    estimate: WeightEstimate,
    server: ServerProperties,
    federation: Federation,
    confidence: float,
    *,
    probabilities: FloatArray,
    sampling: Sampling | None = None,
    steps: tuple[int, int] | None,
    **names: Any,
) -> Audit:
    """The audit that follows from an estimate; ``steps`` are the fewest and the most if these make
    a difference. A log has no sampling; its probabilities are shares of rounds.
    """
    objective, weights = federation.weights, estimate.weights
    consistent = _consistent(estimate, objective, confidence, server)
    both, sampled = (objective, weights), sampling is not None
    findings = server.findings(consistent is False, both, probabilities, steps, sampled)
    exact = not estimate.errors.any()
    half = np.maximum(estimate.half_widths(confidence), _ROUNDING * np.abs(weights))
    return Audit(
        **names,
        client_ids=federation.ids,
        sizes=federation.sizes,
        objective_weights=objective,
        effective_weights=weights,
        inclusion_probabilities=probabilities,
        consistent=consistent,
        exact=exact and server.linear is not False,
        standard_errors=None if exact else estimate.errors,
        intervals=np.stack([weights - half, weights + half], axis=1),
        confidence=confidence,
        properties=server,
        sampling=sampling,
        findings=tuple(findings),
    )


def _consistent(
    estimate: WeightEstimate, objective: FloatArray, confidence: float, server: ServerProperties
) -> bool | None:
    """False if simultaneous intervals exclude the objective that was meant, True if they leave no
    room for another, None if they leave some.
    """
    if server.non_finite_rounds or server.moves_without_updates or server.long_run_gain == np.inf:
        return False
    linear = server.linear is not False
    reach = np.maximum(estimate.half_widths(confidence, together=True), _SURE * estimate.errors)
    distance = np.abs(estimate.weights - objective)
    slack = (CLOSE if linear else 100 * CLOSE) * objective
    if (distance > np.maximum(reach, slack)).any():
        return False
    return True if linear and (distance + reach <= slack).all() else None
