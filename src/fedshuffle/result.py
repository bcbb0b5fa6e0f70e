"""What training leaves, and how it shows itself in a terminal and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from torch import nn

from fedshuffle import _html
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.runs import FACTS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from fedshuffle.evaluation import ClientTable

_OVER_CLIENTS = ("_mean", "_worst_decile", "_undefined")


@final
@dataclass(frozen=True, repr=False)
class Result:
    """What training leaves: the model, one record a round, and the run's folder if it has one."""

    model: nn.Module
    history: list[dict[str, Any]]
    out: Path | None = None
    engine: str = "lean"
    """What did the training."""
    clients: ClientTable | None = field(default=None, compare=False)
    """Every client after the last round, if an :class:`~fedshuffle.Evaluation` measured them."""
    diverged: str | None = None
    """In words, that the loss is not finite or far above that of the start; None if it is not."""

    @property
    def metrics(self) -> list[str]:
        """The names of what was evaluated."""
        return list(dict.fromkeys(k for r in self.history for k in r if k not in FACTS))

    def frame(self) -> pd.DataFrame:
        """The history as a pandas data frame, one row a round; NaN where nothing was evaluated."""
        try:
            import pandas as pd
        except ImportError as error:
            raise FedShuffleError(
                f"a data frame needs pandas ({error}). Install it with"
                " pip install 'fedshuffle[frame]', or read the history, a list of dictionaries."
            ) from error
        return pd.DataFrame(self.history).set_index("round")

    def plot(self, metric: str | None = None, axes: Axes | None = None) -> Axes:
        """Draw a metric over the rounds, with its numbers over clients if they were recorded.

        Args:
            metric: its name; that of the first metric if none.
            axes: where to draw; a new figure if none.
        """
        known = self.metrics
        if not known:
            raise FedShuffleError("nothing was evaluated in this run: give train an Evaluation.")
        if metric is None:
            metric = known[0]
        elif metric not in known:
            raise unknown("metric", metric, known)
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(layout="constrained")[1]
        lines = {metric: "over all", f"{metric}_mean": "mean over clients"}
        lines[f"{metric}_worst_decile"] = "worst tenth of clients"
        for name, label in lines.items():
            points = [(r["round"], r[name]) for r in self.history if name in r]
            if points:
                style = "-" if name == metric else "--"
                axes.plot(*zip(*points, strict=True), style, label=label)
        axes.set(xlabel="round", ylabel=metric)
        axes.legend()
        return axes

    def __repr__(self) -> str:
        words = [f"{len(self.history)} rounds", f"engine {self.engine}"]
        words += [f"diverged: {self.diverged}"] if self.diverged else []
        over_all = [end for end in self._ends() if not end[0].endswith(_OVER_CLIENTS)]
        words += [f"{name} {last:.4g}" for name, _, last in over_all[:6]]
        words += [f"out {str(self.out)!r}"] if self.out is not None else []
        return f"Result({', '.join(words)})"

    def _repr_html_(self) -> str:
        rows = [[name, f"{first:.4g}", f"{last:.4g}"] for name, first, last in self._ends()]
        head = f"{len(self.history)} rounds, engine {self.engine}"
        head += f", in {self.out}" if self.out is not None else ""
        head += f". Diverged: {self.diverged}" if self.diverged else ""
        table = _html.table(["metric", "first evaluated", "last evaluated"], rows) if rows else ""
        return _html.paragraph(head) + table

    def _ends(self) -> list[tuple[str, float, float]]:
        """The first and the last value of everything evaluated."""
        found = []
        for name in self.metrics:
            values = [record[name] for record in self.history if name in record]
            found.append((name, values[0], values[-1]))
        return found
