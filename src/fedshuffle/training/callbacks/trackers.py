"""Callbacks that send every record to an experiment tracker: MLflow, Weights & Biases."""

import abc
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshuffle.errors import optional_import
from fedshuffle.state import State
from fedshuffle.training.callbacks.base import Callback, TrainingContext
from fedshuffle.training.monitoring import Record, scalars

if TYPE_CHECKING:
    from fedshuffle.training.result import Result


class Tracker(Callback):
    """A callback that logs every round once, also if the run is resumed.

    A tracker of your own says how to open a run, log the numbers of a round, and close the run:

    >>> class Printer(Tracker):
    ...     def open(self, context):
    ...         return 0
    ...
    ...     def log(self, numbers, round):
    ...         print(round, numbers["loss"])
    ...
    ...     def close(self, succeeded):
    ...         print("done" if succeeded else "failed")
    """

    _logged = 0

    @abc.abstractmethod
    def open(self, context: TrainingContext) -> int:
        """Start a run at the tracker, or continue it: the last round that it has already."""

    @abc.abstractmethod
    def log(self, numbers: Mapping[str, float], round: int) -> None:
        """Log the numbers of a round."""

    @abc.abstractmethod
    def close(self, succeeded: bool) -> None:
        """Close the run; ``succeeded`` is false if an error ended the training."""

    def on_start(self, context: TrainingContext) -> None:
        self._logged = self.open(context)
        for record in context.history:
            self._add(record)

    def on_round(self, record: Record, state: State) -> None:
        self._add(record)

    def on_end(self, result: "Result | None") -> None:
        self.close(result is not None)

    def _add(self, record: Record) -> None:
        if record["round"] > self._logged:  # a resumed run repeats the rounds after a checkpoint
            self._logged = record["round"]
            self.log(scalars(record), self._logged)


class MLflow(Tracker):
    """Log every round to MLflow (``pip install 'fedshuffle[mlflow]'``).

    A run with a folder has its id as the tag ``fedshuffle.run``, by which it is found when it is
    resumed.

    Args:
        tracking_uri: a server, or a database such as ``"sqlite:///runs.db"``; by default what
            MLflow's own settings say.
        experiment: the name of the experiment, created if there is none.
        run_name: by default a name that MLflow invents.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "fedshuffle",
        run_name: str | None = None,
    ) -> None:
        self._uri, self._experiment, self._name = tracking_uri, experiment, run_name
        self._mlflow = optional_import("mlflow", "MLflow", "mlflow")

    def open(self, context: TrainingContext) -> int:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        place = found.experiment_id if found else self._client.create_experiment(self._experiment)
        if context.run_id is not None:
            same = f"tags.`fedshuffle.run` = '{context.run_id}'"
            for run in self._client.search_runs([place], same, max_results=1):
                self._run = run.info.run_id
                self._client.update_run(self._run, status="RUNNING")
                logged = self._client.get_metric_history(self._run, "steps")
                return max((point.step for point in logged), default=0)
        tags = {} if context.run_id is None else {"fedshuffle.run": context.run_id}
        run = self._client.create_run(place, tags=tags, run_name=self._name)
        self._run = run.info.run_id
        settings = context.simulation.settings(context.rounds)
        kind = self._mlflow.entities.Param
        shown = [kind(name, f"{value!s:.500}") for name, value in settings.items()]
        self._client.log_batch(self._run, params=shown)
        return 0

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        now, kind = int(1000 * time.time()), self._mlflow.entities.Metric
        points = [kind(name, float(value), now, round) for name, value in numbers.items()]
        self._client.log_batch(self._run, metrics=points)

    def close(self, succeeded: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if succeeded else "FAILED")


class WandB(Tracker):
    """Log every round to Weights & Biases (``pip install 'fedshuffle[wandb]'``).

    A run with a folder has the same id there and at W&B, so that a resumed run is continued.
    Offline, a resumed run is written again from its records into one new folder, which replaces
    the old ones: ``wandb sync`` uploads every round once.

    Args:
        project: the name of the project.
        mode: ``"online"``, ``"offline"`` or ``"disabled"``; by default what W&B's settings say.
        folder: where W&B keeps its files; by default the folder of the run, or the current one.
        options: further arguments of ``wandb.init``, such as ``name`` or ``tags``.
    """

    def __init__(
        self,
        project: str = "fedshuffle",
        mode: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self._project, self._mode, self._folder, self._options = project, mode, folder, options
        self._wandb = optional_import("wandb", "WandB", "wandb")

    def open(self, context: TrainingContext) -> int:
        place = Path(self._folder or context.folder or ".")
        old = sorted(place.glob(f"wandb/offline-run-*-{context.run_id}*"))
        self._run = self._wandb.init(
            project=self._project,
            mode=self._mode,
            dir=str(place),
            id=context.run_id,
            config=context.simulation.settings(context.rounds),
            **{"resume": "allow" if self._online else None, **self._options},
        )
        for folder in old:
            shutil.rmtree(folder)
        return max(0, int(self._run.step) - 1)  # W&B counts from the next step

    @property
    def _online(self) -> bool:
        mode = self._mode or os.environ.get("WANDB_MODE", "online")
        return mode == "online"

    def log(self, numbers: Mapping[str, float], round: int) -> None:
        self._run.log(dict(numbers), step=round)

    def close(self, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)
