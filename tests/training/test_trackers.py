"""MLflow and Weights & Biases, offline: what they wrote is read back from their files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshuffle import Federation, FedShuffleError, Result, train
from fedshuffle.state import State
from fedshuffle.training.callbacks import Callback, MLflow, WandB
from fedshuffle.training.monitoring import Record, scalars
from fedshuffle.training.run_folder import RunFolder
from tests.problems import Point, half_squared_distance, targets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of their libraries
    pytest.mark.xdist_group("trackers"),
]
FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])


class FailAt(Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, record: Record, state: State) -> None:
        if state.round == self.round:
            raise KilledError


class KilledError(BaseException):
    """Nothing is saved after it, so rounds since the last checkpoint are done again."""


def go(*called: Callback, **settings: Any) -> Result:
    return train(
        Point(2),
        FEDERATION,
        loss=half_squared_distance,
        rounds=8,
        sampling="uniform:2",
        evaluate=lambda model: {"norm": float(model.x.norm())},
        evaluate_every=2,
        checkpoint_every=3,
        callbacks=called,
        **settings,
    )


def wanted(result: Result) -> dict[str, list[tuple[int, float]]]:
    """Every number of the history by name, with its round."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in result.history:
        for name, value in scalars(record).items():
            found.setdefault(name, []).append((record["round"], value))
    return found


def numbers(found: dict[str, list[tuple[int, float]]]) -> dict[str, list[tuple[int, float]]]:
    """Without times, which differ when a round is done again."""
    return {name: points for name, points in found.items() if not name.endswith("seconds")}


# MLflow -------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path / 'tracked.db'}"


def mlflow_runs(database: str, experiment: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    place = client.get_experiment_by_name(experiment)
    return list(client.search_runs([place.experiment_id]))


def mlflow_points(database: str, run: Any) -> dict[str, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(point.step, point.value) for point in h] for name, h in history.items()}


def test_mlflow_gets_every_round_once(tmp_path: Path, database: str) -> None:
    result = go(MLflow(database, "plain", "mine"))
    (run,) = mlflow_runs(database, "plain")
    assert mlflow_points(database, run) == wanted(result)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.params["method"] == "fedshuffle"
    assert run.data.params["seed"] == "0"

    out = tmp_path / "run"
    with pytest.raises(KilledError):
        go(MLflow(database, "killed"), FailAt(5), out=out)
    (run,) = mlflow_runs(database, "killed")
    assert run.info.status == "FAILED"
    assert [step for step, _ in mlflow_points(database, run)["steps"]] == [1, 2, 3, 4, 5]
    result = go(MLflow(database, "killed"), out=out, resume=True)
    (run,) = mlflow_runs(database, "killed")  # the same run goes on
    assert numbers(mlflow_points(database, run)) == numbers(wanted(result))
    assert run.info.status == "FINISHED"
    assert run.data.tags["fedshuffle.run"] == RunFolder(out).settings()["run"]


@pytest.mark.usefixtures("database")
def test_an_error_of_mlflow_names_it() -> None:
    with pytest.raises(FedShuffleError, match=r"^callback MLflow at the start: \w"):
        go(MLflow("nowhere://tracked"))


def test_two_trackers_at_once(tmp_path: Path, database: str) -> None:
    result = go(MLflow(database, "both"), offline(), out=tmp_path / "run")
    (run,) = mlflow_runs(database, "both")
    (folder,) = (tmp_path / "run").glob("wandb/offline-run-*")
    assert mlflow_points(database, run) == wandb_points(folder) == wanted(result)


# Weights & Biases ---------------------------------------------------------------------------------


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: protobuf messages in LevelDB's log format.

    After a header of 7 bytes come blocks of 32 kB; a piece of a message is a checksum (4 bytes),
    its length (2), its kind (whole, first, middle or last: 1 to 4), and its data.
    """
    from wandb.proto.wandb_internal_pb2 import Record as Message

    data, at, pieces = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        pieces += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            message = Message()
            message.ParseFromString(pieces)
            yield message
            pieces = b""


def wandb_points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    import wandb

    found: dict[str, list[tuple[int, float]]] = {}
    wandb.teardown()  # waits until its process has written everything
    (file,) = folder.glob("*.wandb")
    for message in wandb_records(file):
        if message.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in message.history.item
            }
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append((items["_step"], value))
    return found


def wandb_config(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.wandb")
    for message in wandb_records(file):
        if message.WhichOneof("record_type") == "run":
            return {item.key: json.loads(item.value_json) for item in message.run.config.update}
    raise AssertionError("no run was recorded")


def offline(folder: Path | None = None) -> WandB:
    import wandb

    quiet = wandb.Settings(silent=True, console="off")
    return WandB("project", mode="offline", folder=folder, settings=quiet)


def test_wandb_gets_every_round_once(tmp_path: Path) -> None:
    result = go(offline(tmp_path))
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert wandb_points(folder) == wanted(result)
    config = wandb_config(folder)
    assert (config["method"], config["seed"]) == ("fedshuffle", 0)

    out = tmp_path / "run"
    with pytest.raises(KilledError):
        go(offline(), FailAt(5), out=out)
    (folder,) = out.glob("wandb/offline-run-*")
    assert [step for step, _ in wandb_points(folder)["steps"]] == [1, 2, 3, 4, 5]
    result = go(offline(), out=out, resume=True)
    (folder,) = out.glob("wandb/offline-run-*")  # instead of the one before
    assert numbers(wandb_points(folder)) == numbers(wanted(result))
    assert RunFolder(out).settings()["run"] in folder.name
