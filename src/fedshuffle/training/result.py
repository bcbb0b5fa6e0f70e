"""The result of a training: the model, and one record per round."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedshuffle._terminal import html_table
from fedshuffle.errors import FedShuffleError, optional_import, unknown
from fedshuffle.evaluation import ClientTable
from fedshuffle.training.monitoring import TRAINING_METRICS, metrics_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Result:
    """The result of :func:`fedshuffle.train`: the model, and one record per round.

    >>> Result(nn.Identity(), [{"round": 1, "loss": 2.0}, {"round": 2, "loss": 0.5}])
    Result(2 rounds, engine sequential, loss 0.5)
    """

    model: nn.Module
    history: list[dict[str, Any]]
    out: Path | None = None
    """The folder of the run, if it has one."""
    engine: str = "sequential"
    """The engine that did the training."""
    clients: ClientTable | None = field(default=None, compare=False)
    """Every client after the last round, if an :class:`~fedshuffle.Evaluation` measured them."""
    diverged: str | None = None
    """Why the run counts as diverged, with its loss; None otherwise."""
    stopped: str | None = None
    """What stopped the run early, a callback or the privacy budget; None if nothing did."""

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, those of the training last."""
        seen = dict.fromkeys(name for record in self.history for name in metrics_of(record))
        return sorted(seen, key=TRAINING_METRICS.__contains__)

    def frame(self) -> "pd.DataFrame":
        """The history as a pandas data frame, one row per round; NaN where not evaluated."""
        pandas = optional_import("pandas", "a data frame", "frame", "or read the history, a list")
        frame: pd.DataFrame = pandas.DataFrame(self.history).set_index("round")
        return frame

    def plot(self, metric: str | None = None, axes: "Axes | None" = None) -> "Axes":
        """Draw a metric (by default the first) over the rounds, with its mean and worst decile over
        clients if they were recorded; by default in a new figure.
        """
        known = self.metrics
        if not known:
            raise FedShuffleError("this run has no metrics: give train an Evaluation.")
        metric = known[0] if metric is None else metric
        if metric not in known:
            raise unknown("metric", metric, known)
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(layout="constrained")[1]
        labels = {"": "all examples", "_mean": "mean over clients"}
        for suffix, label in (labels | {"_worst_decile": "worst tenth of the clients"}).items():
            name = metric + suffix
            if points := [(r["round"], r[name]) for r in self.history if name in r]:
                axes.plot(*zip(*points, strict=True), "--" if suffix else "-", label=label)
        axes.set(xlabel="round", ylabel=metric)
        axes.legend()
        return axes

    def __repr__(self) -> str:
        words = [f"{len(self.history)} rounds", f"engine {self.engine}"]
        words += [f"diverged: {self.diverged}"] if self.diverged else []
        words += [self.stopped] if self.stopped else []
        over_clients = ("_mean", "_worst_decile", "_undefined")
        over_all = [end for end in self._ends() if not end[0].endswith(over_clients)]
        words += [f"{name} {last:.4g}" for name, _, last in over_all[:6]]
        words += [f"out {str(self.out)!r}"] if self.out is not None else []
        return f"Result({', '.join(words)})"

    def _repr_html_(self) -> str:
        rows = [[name, f"{first:.4g}", f"{last:.4g}"] for name, first, last in self._ends()]
        head = f"{len(self.history)} rounds, engine {self.engine}"
        head += f", in {self.out}" if self.out is not None else ""
        head += f". Diverged: {self.diverged}" if self.diverged else ""
        head += f". {self.stopped}" if self.stopped else ""
        table = html_table(["metric", "first", "last"], rows) if rows else ""
        return f"<p>{escape(head)}</p>{table}"

    def _ends(self) -> list[tuple[str, float, float]]:
        values = {m: [record[m] for record in self.history if m in record] for m in self.metrics}
        return [(metric, found[0], found[-1]) for metric, found in values.items()]
