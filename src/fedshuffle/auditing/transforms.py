r"""What transforms do to the objective: what they declare, and what clipping did along a run.

A transform that leaves the mean update as it is leaves the objective as it is. Clipping does not:
it multiplies the update of client i by :math:`\min(1, C / |u_i|)`, so along a run the client counts

.. math:: \hat w_i \propto w_i \, E \min(1, C / |u_i|),

which depends on the model and cannot be known before. :func:`measured_clipping` measures it.
"""

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, jsonable, number
from fedshuffle.auditing.findings import Finding, findings_of
from fedshuffle.auditing.subject import Subject
from fedshuffle.errors import FedShuffleError, error_context, visible
from fedshuffle.federation import Federation
from fedshuffle.transforms import Chain, Transform

if TYPE_CHECKING:
    from rich.console import Console

_NOTES = {
    "unbiased": "{}: unbiased, so the objective is the same; the variance is larger",
    "restored": "{}: biased in one round; clients remember what is left out and send it later, so"
    " the objective is the same in the long run",
}
_ROWS = 24  # clients of a report that are shown, those that lose most first


def transform_effects(
    subject: Subject, transforms: Sequence[Transform]
) -> tuple[list[Finding], list[str], bool | None]:
    """What transforms do to the mean update: findings, notes, and whether the objective stays as
    it is (None if that depends on the updates).
    """
    findings: list[Finding] = []
    notes: list[str] = []
    keeps: bool | None = True
    for one in Chain(tuple(transforms)).flat:
        name = visible(f"{one!r:.80}")
        kept = {"biased": False, "model-dependent": None}.get(one.mean, True)
        causes = {"biased transform": kept is False, "model-dependent": kept is None}
        longest = _longest(subject) if kept is None else ""
        findings += findings_of(causes, transform=name, longest=longest)
        notes += [_NOTES[one.mean].format(name)] if one.mean in _NOTES else []
        keeps = kept if keeps is True or kept is False else keeps
    return findings, notes, keeps


def _longest(subject: Subject) -> str:
    """Which clients go furthest on their way: step size times steps, at equal gradients."""
    steps = subject.workload.possible_steps[0][:, -1]
    cohort = subject.cohort(np.arange(len(steps)), steps)
    distance = subject.method.averaging.step_scale(cohort) * cohort.done_length
    if np.ptp(distance) <= 1e-9 * distance.max():
        return "all clients go equally far, so that is decided by their gradients"
    ids, far, near = subject.federation.ids, int(distance.argmax()), int(distance.argmin())
    return (
        f"at equal gradients client {visible(str(ids[far]))} goes"
        f" {distance[far] / distance[near]:.3g} times as far as client {visible(str(ids[near]))}"
    )


@dataclass(frozen=True, eq=False, repr=False)
class ClippingReport:
    """Whose weight clipping cut along a run, and by how much."""

    clip: float
    client_ids: Sequence[Hashable]
    objective_weights: FloatArray
    factors: FloatArray  # the mean of min(1, C / norm), per client; NaN if it never took part
    standard_errors: FloatArray  # of the factors
    times: IntArray  # how often each client took part
    clipped: FloatArray  # the share of a client's updates that were clipped

    @property
    def effective_weights(self) -> FloatArray:
        """``w_i E min(1, C/|u_i|)``, normalised; clients never seen lose as all do on average."""
        raw = self.objective_weights * self._filled
        weights: FloatArray = raw / raw.sum()
        return weights

    @property
    def effective_errors(self) -> FloatArray:
        """Standard errors of the effective weights, to first order."""
        w, weights = self.objective_weights, self.effective_weights
        spread = np.where(self.times > 0, w * self.standard_errors, 0.0) ** 2
        total = float((w * self._filled).sum())
        variance = (1 - 2 * weights) * spread + weights**2 * spread.sum()
        errors: FloatArray = np.where(self.times > 0, np.sqrt(variance) / total, np.inf)
        return errors

    @property
    def _filled(self) -> FloatArray:
        seen, w = self.times > 0, self.objective_weights
        mean = (w[seen] * self.factors[seen]).sum() / w[seen].sum()
        return np.where(seen, self.factors, mean)

    @property
    def total_variation(self) -> float:
        """The share of the objective that clipping moved to the wrong place."""
        return 0.5 * float(np.abs(self.effective_weights - self.objective_weights).sum())

    @property
    def losing(self) -> IntArray:
        """Clients whose weight was cut more than the average, by more than two standard errors,
        most first.
        """
        ratio, error = self.effective_weights / self.objective_weights, self.effective_errors
        lost = np.flatnonzero(ratio + 2 * error / self.objective_weights < 1 - 1e-12)
        return lost[np.argsort(ratio[lost], kind="stable")]

    def __repr__(self) -> str:
        return f"<clipping at {self.clip:g}: {self.conclusion}>"

    @property
    def conclusion(self) -> str:
        """What clipping did, in a sentence."""
        share = np.average(self.clipped, weights=self.times)
        if not share:
            return "no update was clipped; the objective is the one you meant."
        text = f"{share:.1%} of the updates were clipped; {self.total_variation:.2%} of the"
        text += " objective is in the wrong place"
        if len(self.losing):
            i = self.losing[0]
            ratio = self.effective_weights[i] / self.objective_weights[i]
            client = visible(str(self.client_ids[i]))
            text += f", client {client} counts {ratio:.3g} times what you meant"
        return text + "."

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; null for what is unknown."""
        ids = [i if isinstance(i, int | str) else str(i) for i in self.client_ids]
        names = ("effective_weights", "effective_errors", "total_variation", "losing")
        more = {name: getattr(self, name) for name in names}
        plain: dict[str, Any] = jsonable({**asdict(self), "client_ids": ids, **more})
        return plain


def measured_clipping(
    clients: ArrayLike, norms: ArrayLike, federation: Federation, clip: float
) -> ClippingReport:
    """Whose weight clipping cuts, from the norm of each update and the client that made it.

    >>> federation = Federation.from_sizes([1, 1])
    >>> report = measured_clipping([0, 1, 0, 1], [0.5, 2.0, 0.5, 4.0], federation, clip=1.0)
    >>> report.factors.tolist(), report.effective_weights.round(3).tolist()
    ([1.0, 0.375], [0.727, 0.273])
    """
    number(clip, "clip", within="(0, inf)")
    who, norm = np.asarray(clients, dtype=np.int64), np.asarray(norms, dtype=np.float64)
    n = len(federation)
    if who.shape != norm.shape or not len(who):
        raise FedShuffleError(
            f"there are {who.size} clients and {norm.size} norms of updates: give one of each per"
            " update, at least one."
        )
    if who.min() < 0 or who.max() >= n:
        raise FedShuffleError(
            f"client {who.max()} is not one of the {n} clients: give the federation of the run."
        )
    if not (np.isfinite(norm).all() and (norm >= 0).all()):
        raise FedShuffleError("a norm of an update is negative, NaN or infinite.")
    factor = clip / np.maximum(norm, clip)
    times = np.bincount(who, minlength=n)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(who, weights=factor, minlength=n) / times
        clipped = np.bincount(who, weights=norm > clip, minlength=n) / np.maximum(times, 1)
    squares = np.bincount(who, weights=(factor - mean[who]) ** 2, minlength=n)
    # A client seen once shows no spread: it gets that of all.
    pooled = squares.sum() / max(len(who) - np.count_nonzero(times), 1)
    variance = np.where(times > 1, squares / np.maximum(times - 1, 1), pooled)
    errors = np.sqrt(variance / np.maximum(times, 1))
    errors[times == 0] = np.inf
    return ClippingReport(
        float(clip), federation.ids, federation.weights, mean, errors, times, clipped
    )


def clipping_report(folder: str | Path, federation: Federation, clip: float) -> ClippingReport:
    """The same from the folder of a run that recorded its clients (``record_clients=True``)."""
    pairs = list(_recorded(Path(folder) / "metrics.jsonl"))
    if not pairs:
        raise FedShuffleError(
            f"{str(folder)!r} has no norm of a client's update: train with record_clients=True."
        )
    clients, norms = (np.concatenate(values) for values in zip(*pairs, strict=True))
    return measured_clipping(clients, norms, federation, clip)


def _recorded(path: Path) -> Iterator[tuple[IntArray, FloatArray]]:
    """The clients and the norms of their updates in every round that recorded them."""
    unreadable = (OSError, UnicodeDecodeError)
    with error_context(lambda error: f"cannot read {str(path)!r}: {error}.", unreadable):
        lines = path.read_text(encoding="utf-8").splitlines()
    for line, words in enumerate(lines, 1):
        with error_context(f"{path}, line {line}", (ValueError, TypeError, KeyError, IndexError)):
            record = json.loads(words)
            rows = record.get("per_client", {})
            norms = np.array(rows.get("update_norm", []), dtype=np.float64)
            if not len(norms):
                continue
            clients = np.array(rows["client"] if "client" in rows else record["cohort"])
            if len(clients) != len(norms):
                raise ValueError(f"there are {len(clients)} clients and {len(norms)} norms.")
            known = ~np.isnan(norms)  # a client without an update has none
            yield clients[known].astype(np.int64), norms[known]


def print_clipping(console: "Console", report: ClippingReport) -> None:
    """Print whose weight was cut, by how much."""
    from rich.markup import escape

    from fedshuffle._terminal import plain_table

    weights, errors = report.effective_weights, report.effective_errors
    order = np.argsort(weights / report.objective_weights, kind="stable")
    columns = ("client", "rounds", "clipped", "kept", "you meant", "really")
    table = plain_table(*columns, align="rrrrrr")
    for i in order[:_ROWS]:
        margin = f" ± {1.96 * errors[i]:.2%}" if np.isfinite(errors[i]) else " ± ?"
        table.add_row(
            escape(visible(str(report.client_ids[i]))),
            f"{report.times[i]}",
            f"{report.clipped[i]:.0%}",
            f"{report.factors[i]:.3f}" if report.times[i] else "?",
            f"{report.objective_weights[i]:.2%}",
            f"{weights[i]:.2%}{margin}",
        )
    console.print(f"[bold]clipping at {report.clip:g}[/]", highlight=False)
    console.print(table)
    console.print(f"\n{escape(report.conclusion)}", highlight=False)
