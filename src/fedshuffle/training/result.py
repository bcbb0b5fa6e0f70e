"""The result of a training: the model, and one record per round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from fedshuffle import _figures
from fedshuffle._terminal import html_table
from fedshuffle.errors import FedShuffleError, check_known, optional_import, unknown
from fedshuffle.evaluation import ClientTable
from fedshuffle.training.monitoring import TRAINING_METRICS, metrics_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_AXES = {"round": "round", "steps": "local steps of all clients", "time": "simulated seconds"}


@dataclass(frozen=True, repr=False)
class Result:
    """The result of :func:`fedshuffle.train`: the model, and one record per round.

    >>> Result(nn.Identity(), [{"round": 1, "loss": 2.0}, {"round": 2, "loss": 0.5}])
    Result(2 rounds, engine sequential, loss 0.5)
    """

    model: nn.Module
    """The trained model. Its frozen parameters share memory with those of the model that was given:
    copy it (``copy.deepcopy``) before you merge adapters into them."""
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

    def plot(
        self,
        metric: str | Sequence[str] | None = None,
        ax: "Axes | None" = None,
        *,
        over: Literal["round", "steps", "time"] = "round",
        label: str | None = None,
        log: bool = False,
        **line: Any,
    ) -> "Axes":
        """Draw metrics over rounds, steps or time: a colour per result, a dash per metric.

        Results share a picture if they share axes::

            ax = one.plot("accuracy", label="FedAvg")
            other.plot("accuracy", ax, label="FedShuffle")

        Args:
            metric: one metric or several (:attr:`metrics` lists them); by default the first, with
                its mean and its worst decile over clients if they were recorded.
            ax: where to draw; by default in a new figure, which a notebook shows. In a script, call
                ``ax.figure.savefig("run.png")``.
            over: the horizontal axis: ``"round"``, the local ``"steps"`` of all clients so far, or
                the simulated ``"time"`` if the run has a clock.
            label: what the legend calls this result.
            log: whether the vertical axis is logarithmic, which shows positive values only.
            line: options of the lines, such as ``color="black"``, for matplotlib's ``plot``.
        """
        names = self._names_to_draw(metric)
        for name in names:
            if name not in self.metrics:
                raise unknown("metric", name, self.metrics)
        values = [r[name] for r in self.history for name in names if r.get(name) is not None]
        if log and not any(value > 0 for value in values):
            raise FedShuffleError(f"log=True: {', '.join(names)} has no positive value to show.")
        places = self._places(over)
        ax = _figures.axes_to_draw(ax)
        from matplotlib.cbook import normalize_kwargs
        from matplotlib.lines import Line2D
        from matplotlib.ticker import MaxNLocator

        look: dict[str, Any] = {"color": _figures.next_colour(ax), "linewidth": 1.8}
        look |= normalize_kwargs(line, Line2D)  # lw is linewidth
        for (name, words), dash in zip(names.items(), cycle(_figures.DASHES)):
            points = [(at, r[name]) for at, r in zip(places, self.history) if name in r]
            text = words if label is None else f"{label}, {words}" if len(names) > 1 else label
            marker = "o" if len(points) == 1 else ""
            own = {"linestyle": dash, "marker": marker, "label": text} | look
            ax.plot(*zip(*points, strict=True), **own)
        ax.set_xlabel(_AXES[over])
        if over != "time":
            ticks = MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)
            ax.xaxis.set_major_locator(ticks)
        if not ax.get_ylabel() and (metric is None or len(names) == 1):
            ax.set_ylabel(next(iter(names)))
        if log:
            _figures.log_scale(ax)
        if len(ax.get_lines()) > 1 or label:
            ax.legend(frameon=False)
        return ax

    def _places(self, over: str) -> list[float]:
        """Where each record is on the horizontal axis."""
        check_known("axis", over, _AXES)
        if over == "steps":
            return list(accumulate(record["steps"] for record in self.history))
        if over == "time" and not all("time" in record for record in self.history):
            raise FedShuffleError(
                "this run has no time to draw over: give train a clock, such as"
                " clock='lognormal:0.1:1'."
            )
        return [record[over] for record in self.history]

    def _names_to_draw(self, metric: str | Sequence[str] | None) -> dict[str, str]:
        """The metrics to draw, with their words for the legend."""
        if isinstance(metric, str):
            return {metric: metric}
        if metric:
            return {name: name for name in metric}
        if metric is not None:
            raise FedShuffleError("metric is empty: name at least one.")
        if not self.metrics:
            raise FedShuffleError("this run has no metrics: give train an Evaluation.")
        first = self.metrics[0]
        words = {"": "all examples", "_mean": "mean over clients"}
        words["_worst_decile"] = "worst tenth of the clients"
        found = {first + end: text for end, text in words.items() if first + end in self.metrics}
        return found if len(found) > 1 else {first: first}

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
