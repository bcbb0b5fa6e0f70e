"""Callbacks: called in order, with a past that follows from the records, and harmless."""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import Evaluation, Federation, FedShuffleError, Privacy, Result, callbacks, train
from fedshuffle.privacy import Clip
from fedshuffle.state import State
from fedshuffle.training.callbacks import (
    Callback,
    Checkpointing,
    EarlyStopping,
    ReduceOnPlateau,
    TensorBoard,
    Tracker,
    TrainingContext,
)
from fedshuffle.training.monitoring import Record
from fedshuffle.training.run_folder import RunFolder
from fedshuffle.transforms import ClientContext, Message, Transform
from tests.problems import Point, copies, half_squared_distance, targets

FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])


def go(*called: Any, rounds: int = 8, **settings: Any) -> Result:
    defaults: dict[str, Any] = {"loss": half_squared_distance, "sampling": "uniform:2", "seed": 1}
    return train(Point(2), FEDERATION, rounds=rounds, callbacks=called, **(defaults | settings))


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


class Scripted:
    """An evaluation that gives numbers from a list, by the round it is called in."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values, self.calls = values, 0

    def from_round(self, done: int) -> "Scripted":
        self.calls = done
        return self

    def __call__(self, model: nn.Module) -> dict[str, float]:
        self.calls += 1
        return {"score": self.values[self.calls - 1]}


class Log(Callback):
    """Writes down how it is called."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.stop_after = stop_after

    def on_start(self, context: TrainingContext) -> None:
        self.context = context
        self.seen.append(("start", len(context.history)))

    def on_round(self, record: Record, state: State) -> bool:
        assert record["round"] == state.round == len(self.context.history)
        self.seen.append(("round", state.round))
        return state.round == self.stop_after

    def on_end(self, result: Result | None) -> None:
        self.seen.append(("end", result))


class Failing(Callback):
    """Raises at a hook."""

    def __init__(self, hook: str, round: int = 5, error: BaseException | None = None) -> None:
        self.hook, self.round = hook, round
        self.error = error or ZeroDivisionError("of the user")

    def on_start(self, context: TrainingContext) -> None:
        if self.hook == "start":
            raise self.error

    def on_round(self, record: Record, state: State) -> None:
        if self.hook == "round" and state.round == self.round:
            raise self.error

    def on_end(self, result: Result | None) -> None:
        if self.hook == "end" or (self.hook == "abort" and result is None):
            raise self.error


def test_hooks_are_called_in_order_and_change_nothing() -> None:
    first, second = Log(), Log()
    result = go(first, second)
    wanted = [("start", 0), *(("round", r) for r in range(1, 9)), ("end", result)]
    assert first.seen == second.seen == wanted
    assert torch.equal(vector(result.model), vector(go().model))
    assert result.stopped is None
    model = first.context.simulation.model(State(vector(result.model)))
    assert torch.equal(vector(model), vector(result.model))


def test_a_hook_may_stop_the_training_after_all_have_seen_the_round(tmp_path: Path) -> None:
    stopping, other = Log(stop_after=3), Log()
    result = go(stopping, other, out=tmp_path)
    assert [record["round"] for record in result.history] == [1, 2, 3]
    assert other.seen[-2] == ("round", 3)
    assert result.stopped == "Log stopped training after round 3"
    assert "Log stopped training" in repr(result)
    assert "Log stopped training" in result._repr_html_()
    saved = RunFolder(tmp_path).latest()
    assert saved is not None
    assert saved.round == 3
    assert torch.equal(saved.x, vector(go(rounds=3).model))


@pytest.mark.parametrize(
    ("hook", "done", "when"),
    [("start", 0, "start"), ("round", 5, "round 5"), ("end", 8, "round 8")],
)
def test_an_error_names_the_callback_and_the_round_and_loses_nothing(
    tmp_path: Path, hook: str, done: int, when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = Log(), Log()
    with pytest.raises(FedShuffleError, match=f"^callback Failing .*{when}: ZeroDivisionError: of"):
        go(before, Failing(hook), after, out=tmp_path, checkpoint_every=100)
    assert "resume=True" in capsys.readouterr().err
    folder = RunFolder(tmp_path)
    saved = folder.latest()
    assert saved is not None
    assert saved.round == done == len(folder.metrics())
    assert before.seen[-1][0] == "end"
    assert after.seen == [] if hook == "start" else after.seen[-1] == ("end", None)
    resumed = go(out=tmp_path, resume=True)
    assert torch.equal(vector(resumed.model), vector(go().model))


def test_an_error_at_the_end_does_not_hide_the_first_one() -> None:
    last = Log()
    with pytest.raises(FedShuffleError, match="callback Failing after round 2") as caught:
        go(Failing("abort", error=OSError("no disk")), Failing("round", 2), last)
    assert caught.value.__notes__ == ["callback Failing failed at the end: OSError: no disk."]
    assert last.seen[-1] == ("end", None)


def test_sys_exit_in_a_callback_is_an_error() -> None:
    with pytest.raises(FedShuffleError, match=r"callback Failing after round 2: sys.exit\(3\)"):
        go(Failing("round", 2, SystemExit(3)))


@pytest.mark.parametrize(("hook", "done"), [("start", 0), ("round", 5), ("end", 8)])
def test_ctrl_c_in_a_callback_saves_the_run(tmp_path: Path, hook: str, done: int) -> None:
    before, after = Log(), Log()
    with pytest.raises(KeyboardInterrupt):
        go(before, Failing(hook, error=KeyboardInterrupt()), after, out=tmp_path)
    assert before.seen[-1][0] == "end"
    assert after.seen == [] if hook == "start" else after.seen[-1] == ("end", None)
    saved = RunFolder(tmp_path).latest()
    assert saved is not None
    assert saved.round == done
    assert torch.equal(vector(go(out=tmp_path, resume=True).model), vector(go().model))


class StopAtOnce(Log):
    def on_start(self, context: TrainingContext) -> bool:  # type: ignore[override]
        super().on_start(context)
        return True


def test_a_training_may_be_stopped_before_it_starts(tmp_path: Path) -> None:
    """All callbacks start and end, no round is done, and the run can be resumed."""
    stopping, other = StopAtOnce(), Log()
    result = go(stopping, other, out=tmp_path, evaluate=Scripted([]))
    assert result.history == []
    assert result.stopped == "StopAtOnce stopped training after round 0"
    assert stopping.seen == other.seen == [("start", 0), ("end", result)]
    assert torch.equal(vector(result.model), torch.zeros(2, dtype=torch.float64))
    assert repr(result).startswith("Result(0 rounds")
    assert torch.equal(vector(go(out=tmp_path, resume=True).model), vector(go().model))


class Halving(Callback):
    """Sets a factor of the step size without saying so."""

    def on_round(self, record: Record, state: State) -> None:
        self.step_factor = 0.5


def test_a_step_factor_is_never_ignored() -> None:
    with pytest.raises(FedShuffleError, match=r"callback Halving .* changes_step_size = True"):
        go(Halving())


# A metric that no longer improves -----------------------------------------------------------------


def brute_stop(values: Sequence[float], patience: int, delta: float, sign: int) -> int | None:
    """The first round after which the last ``patience`` values were no improvement."""
    bests: list[float] = []  # that stood before each round
    best = math.inf
    for value in values:
        bests.append(best)
        if sign * value < best - delta:
            best = sign * value
    for r in range(patience, len(values) + 1):
        if all(not sign * values[k] < bests[k] - delta for k in range(r - patience, r)):
            return r
    return None


def replayed(callback: EarlyStopping | ReduceOnPlateau, values: Sequence[float]) -> Iterator[Any]:
    """What the callback says after each record."""
    simulation: Any = None
    callback.on_start(TrainingContext(simulation, 99, [], ["score"]))
    state = State(torch.zeros(1))
    for r, value in enumerate(values, 1):
        yield callback.on_round({"round": r, "clients": 1, "score": value}, state)


VALUES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, math.nan]), max_size=12)
SETTINGS = st.tuples(
    st.integers(1, 4), st.sampled_from([0.0, 0.5]), st.sampled_from(["min", "max"])
)


@given(VALUES, SETTINGS)
def test_early_stopping_stops_after_patience_records_without_improvement(
    values: list[float], settings: tuple[int, float, Any]
) -> None:
    patience, delta, mode = settings
    stopping = EarlyStopping("score", patience, delta, mode)
    stops = [r for r, stop in enumerate(replayed(stopping, values), 1) if stop]
    wanted = brute_stop(values, patience, delta, 1 if mode == "min" else -1)
    assert stops[:1] == ([] if wanted is None else [wanted])
    # The same follows from the records alone.
    history = [{"round": r, "clients": 1, "score": v} for r, v in enumerate(values, 1)]
    simulation: Any = None
    asked = EarlyStopping("score", patience, delta, mode)
    assert asked.on_start(TrainingContext(simulation, 99, history)) == (wanted is not None)


@given(VALUES, SETTINGS, st.integers(0, 12))
def test_the_step_factor_is_a_function_of_the_records(
    values: list[float], settings: tuple[int, float, Any], done: int
) -> None:
    """Replaying some of the records and seeing the others gives the same as seeing all."""
    patience, delta, mode = settings
    whole = ReduceOnPlateau("score", 0.5, patience, delta, mode)
    factors = [1.0, *(whole.step_factor for _ in replayed(whole, values))]
    history = [{"round": r, "clients": 1, "score": v} for r, v in enumerate(values, 1)]
    simulation: Any = None
    resumed = ReduceOnPlateau("score", 0.5, patience, delta, mode)
    for _ in range(2):  # an object may serve two trainings
        resumed.on_start(TrainingContext(simulation, 99, history[:done], ["score"]))
        assert resumed.step_factor == factors[min(done, len(values))]
        for r, record in enumerate(history[done:], done + 1):
            resumed.on_round(record, State(torch.zeros(1)))
            assert resumed.step_factor == factors[r]


def test_reduce_on_plateau_multiplies_the_step_size() -> None:
    """One client at 1 and one step a round: x <- x + f eta (1 - x)."""
    federation = copies([1], torch.ones(1, 1, dtype=torch.float64))
    scores = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    factors = [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]  # reduced after rounds 4 and 7: patience 2
    result = train(
        Point(1),
        federation,
        loss=half_squared_distance,
        rounds=8,
        step_size=lambda r: 0.1 * (r + 1),
        evaluate=Scripted(scores),
        callbacks=[ReduceOnPlateau("score", factor=0.5, patience=2)],
    )
    x = 0.0
    for r, factor in enumerate(factors):
        x += factor * 0.1 * (r + 1) * (1 - x)
    assert float(vector(result.model)) == pytest.approx(x, rel=1e-12)
    assert [record.get("step_factor", 1.0) for record in result.history] == factors


def test_the_step_size_is_reduced_down_to_a_limit() -> None:
    callback = ReduceOnPlateau("score", factor=0.1, patience=1, min_factor=0.05)
    factors = [callback.step_factor for _ in replayed(callback, [1.0] * 4)]
    assert factors == [1.0, 0.1, 0.05, 0.05]


SCORES = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("done", range(1, 14, 2))
def test_a_resumed_run_is_the_same_with_stateful_callbacks(tmp_path: Path, done: int) -> None:
    """Interrupted after some rounds, also after those that led to a reduction or to the stop."""

    def both() -> list[Callback]:
        return [ReduceOnPlateau("score", 0.5, patience=2), EarlyStopping("score", patience=4)]

    whole = go(*both(), rounds=16, evaluate=Scripted(SCORES))
    assert whole.stopped == "EarlyStopping stopped training after round 13"
    assert {record.get("step_factor") for record in whole.history} == {None, 0.5, 0.25, 0.125}
    called = [*both(), Failing("round", done)]
    with pytest.raises(FedShuffleError, match="Failing"):
        go(*called, rounds=16, evaluate=Scripted(SCORES), out=tmp_path)
    for _ in range(2):  # the second finds a run that has stopped
        evaluate = Scripted(SCORES).from_round(len(RunFolder(tmp_path).metrics()))
        resumed = go(*both(), rounds=16, evaluate=evaluate, out=tmp_path, resume=True)
        assert torch.equal(vector(resumed.model), vector(whole.model))
        assert [r.get("step_factor") for r in resumed.history] == [
            r.get("step_factor") for r in whole.history
        ]
        assert resumed.stopped == whole.stopped


@pytest.mark.parametrize("done", range(1, 14, 3))
def test_a_killed_run_is_the_same_with_stateful_callbacks(tmp_path: Path, done: int) -> None:
    """Rounds after the last checkpoint are done again, and the callbacks see them once."""

    def both() -> list[Callback]:
        return [ReduceOnPlateau("train_loss", 0.5, patience=2), EarlyStopping("score", patience=4)]

    settings: dict[str, Any] = {"rounds": 16, "checkpoint_every": 4}
    whole = go(*both(), evaluate=Scripted(SCORES), **settings)
    assert whole.stopped == "EarlyStopping stopped training after round 13"
    called = [*both(), Failing("round", done, Killed())]
    with pytest.raises(Killed):
        go(*called, evaluate=Scripted(SCORES), out=tmp_path, **settings)
    saved = RunFolder(tmp_path).latest()
    assert saved is not None
    assert saved.round == done // 4 * 4
    evaluate = Scripted(SCORES).from_round(saved.round)
    resumed = go(*both(), evaluate=evaluate, out=tmp_path, resume=True, **settings)
    assert torch.equal(vector(resumed.model), vector(whole.model))
    assert resumed.stopped == whole.stopped
    for name in ("step_factor", "train_loss", "score"):
        values = [record.get(name) for record in whole.history]
        assert [record.get(name) for record in resumed.history] == values


def test_a_run_is_resumed_only_with_the_callback_that_changes_its_step_size(tmp_path: Path) -> None:
    evaluate = Scripted(SCORES)
    go(ReduceOnPlateau("score", 0.5), rounds=2, evaluate=evaluate, out=tmp_path / "a")
    go(rounds=2, out=tmp_path / "b")
    settings: dict[str, Any] = {"rounds": 4, "evaluate": evaluate, "resume": True}
    for others in ([], [ReduceOnPlateau("score", 0.25)]):
        with pytest.raises(
            FedShuffleError, match=r"step_size_control .ReduceOnPlateau\(metric='sc"
        ):
            go(*others, out=tmp_path / "a", **settings)
    with pytest.raises(FedShuffleError, match="step_size_control None, not"):
        go(ReduceOnPlateau("score", 0.5), out=tmp_path / "b", **settings)
    # The length of a run may change, and so may what stops it.
    go(ReduceOnPlateau("score", 0.5), EarlyStopping("score"), out=tmp_path / "a", **settings)


def test_a_metric_that_is_never_recorded_is_named_in_the_first_round(tmp_path: Path) -> None:
    for kind in (EarlyStopping, ReduceOnPlateau):
        with pytest.raises(FedShuffleError, match=r"unknown metric 'los'.*'loss'"):
            go(kind("los"), evaluate=Evaluation(FEDERATION, ["loss"]), evaluate_every=4)
        with pytest.raises(FedShuffleError, match=r"unknown metric 'los'.*'loss'"):
            go(kind("los"), evaluate=lambda model: {"loss": 1.0}, evaluate_every=4)
        for name in ("loss", "clipped", "epsilon"):  # nothing clips, nothing is private
            with pytest.raises(FedShuffleError, match=f"unknown metric '{name}'"):
                go(kind(name))
        go(kind("clipped"), transforms=[Clip(0.1)])
        go(kind("loss"), evaluate=Evaluation(FEDERATION, ["loss"]), evaluate_every=4)
        go(kind("loss"), evaluate=lambda model: {"loss": 1.0}, evaluate_every=4)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: EarlyStopping(patience=0), "patience is 0"),
        (lambda: EarlyStopping(min_delta=-1), "min_delta"),
        (lambda: EarlyStopping(mode="up"), "mode 'up'"),  # type: ignore[arg-type]
        (lambda: EarlyStopping(3), "metric"),  # type: ignore[arg-type]
        (lambda: ReduceOnPlateau(factor=1.0), "factor is 1.0"),
        (lambda: ReduceOnPlateau(min_factor=0.0), "min_factor is 0.0"),
        (lambda: Checkpointing("a", every=0), "every is 0"),
        (lambda: go(EarlyStopping), r"is none. Give EarlyStopping\(...\)"),
        (lambda: go(3), "3 is none"),
        (lambda: go(TensorBoard()), "needs a folder"),
        (lambda: go(Checkpointing("a"), out="b"), "not both 'b' and 'a'"),
        (lambda: go(evaluate=lambda model: {"train_loss": 1.0}), "may not return 'train_loss'"),
        (
            lambda: go(evaluate=Evaluation(FEDERATION, ["loss"], prefix="train_")),
            "may not return 'train_loss'.*training_",
        ),
    ],
)
def test_bad_settings_are_named(made: Any, message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        made()


# The built-in ones --------------------------------------------------------------------------------


def test_checkpointing_is_the_same_as_out(tmp_path: Path) -> None:
    go(Checkpointing(tmp_path / "a", every=3, keep=2))
    go(out=tmp_path / "b", checkpoint_every=3, keep=2)
    for name in ("a", "b"):
        saved = sorted(path.stem for path in (tmp_path / name / "checkpoints").glob("*.json"))
        assert saved == ["00000006", "00000008"]
    resumed = go(Checkpointing(tmp_path / "a"), rounds=12, resume=True)
    assert torch.equal(vector(resumed.model), vector(go(rounds=12).model))
    assert resumed.out == tmp_path / "a"


def test_checkpoints_come_first_wherever_they_are_given(tmp_path: Path) -> None:
    with pytest.raises(FedShuffleError, match="Failing after round 5"):
        go(Failing("round", 5), Checkpointing(tmp_path))
    assert len(RunFolder(tmp_path).metrics()) == 5


def test_tensorboard_may_write_to_a_folder_of_its_own(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = go(TensorBoard(tmp_path))
    (events,) = tmp_path.iterdir()
    found = EventAccumulator(str(events)).Reload().Scalars("steps")
    wanted = [(record["round"], record["steps"]) for record in result.history]
    assert [(event.step, event.value) for event in found] == wanted


class Listing(Tracker):
    """A tracker that keeps what it is told, also when the run is resumed."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.ends: list[bool] = []

    def open(self, context: TrainingContext) -> int:
        return max(self.rounds, default=0)

    def log(self, numbers: Any, round: int) -> None:
        assert numbers["clients"] == 2
        self.rounds.append(round)

    def close(self, succeeded: bool) -> None:
        self.ends.append(succeeded)


class Killed(BaseException):
    """Nothing is saved after it."""


def test_a_tracker_logs_every_round_once(tmp_path: Path) -> None:
    """The rounds after the last checkpoint are done again, and not logged again."""
    tracker = Listing()
    with pytest.raises(Killed):
        go(tracker, Failing("round", 5, Killed()), out=tmp_path, checkpoint_every=3)
    go(tracker, out=tmp_path, resume=True)
    assert tracker.rounds == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tracker.ends == [False, True]
    late = Listing()  # given only now: it gets the past too
    go(late, out=tmp_path, resume=True, rounds=9)
    assert late.rounds == list(range(1, 10))


def test_two_trackers_at_once(tmp_path: Path) -> None:
    """Each logs every round once; an error of one closes both."""

    class Broken(Listing):
        def log(self, numbers: Any, round: int) -> None:
            if round == 4:
                raise OSError("no network")
            super().log(numbers, round)

    first, broken = Listing(), Broken()
    with pytest.raises(FedShuffleError, match=r"^callback Broken after round 4: OSError"):
        go(first, broken, out=tmp_path)
    assert (first.rounds, broken.rounds) == ([1, 2, 3, 4], [1, 2, 3])
    second = Listing()
    go(first, second, out=tmp_path, resume=True)
    assert first.rounds == second.rounds == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (first.ends, broken.ends, second.ends) == ([False, True], [False], [True])


class Reporting(Transform):
    """Changes nothing, and reports a number of its own."""

    def client(self, updates: Tensor, state: Tensor | None, context: ClientContext) -> Message:
        return Message(updates, metrics={"mine": updates.new_full((len(updates),), 7.0)})


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, "train_loss "),
        ({"transforms": [Reporting()]}, "train_loss "),
        ({"transforms": [Reporting()], "evaluate": lambda model: {"score": 3.0}}, "score 3 "),
        ({"privacy": Privacy(clip=1.0, noise=1.0), "method": "fedshuffle"}, "train_loss "),
    ],
)
def test_the_bar_shows_a_loss(
    settings: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the numbers of a transform, nor the budget of privacy."""
    go(progress=True, rounds=2, **settings)
    assert f" {shown}" in capsys.readouterr().err


def test_missing_trackers_are_named_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module, kind in (("mlflow", callbacks.MLflow), ("wandb", callbacks.WandB)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(FedShuffleError, match=rf"\[{module}\]"):
            kind()


def test_all_callbacks_are_exported() -> None:
    assert set(callbacks.__all__) <= set(dir(callbacks))
    assert [name for name, _ in itertools.groupby(sorted(callbacks.__all__))] == callbacks.__all__
