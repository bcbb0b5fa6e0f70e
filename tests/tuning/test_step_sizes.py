"""Step sizes from short runs: the right ones, at a bounded cost, and the same ones again."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedshuffle
from fedshuffle import Federation, FedShuffleError, LocalWork, Privacy, losses, methods, train
from fedshuffle.training import rounds
from fedshuffle.tuning import Trial, TunedStepSizes, short_runs, tune
from fedshuffle.tuning.journal import Journal
from fedshuffle.tuning.search import SPACING, Axis, Lattice, Point, descend
from fedshuffle.tuning.short_runs import ShortRuns
from fedshuffle.tuning.step_sizes import WIDEN, _Search
from tests.problems import Point as PointModel
from tests.problems import half_squared_distance

TARGETS = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)


def descent(**options: Any) -> TunedStepSizes:
    """Four clients with two equal examples each, whose mean is (1, 1).

    With ``e`` the distance to it, the loss is ``1/2 + e^2 / 2``, at the start ``3/2``, and a round
    multiplies e by ``1 - server_step_size (1 - (1 - step_size)^2)``.
    """
    data = Federation.from_arrays(TARGETS.repeat_interleave(2, dim=0), sizes=[2] * 4)
    settings: dict[str, Any] = {"loss": half_squared_distance, "rounds": 60, **options}
    return tune(PointModel(2), data, **settings)


def exact(step_size: float, server_step_size: float, rounds: int) -> float | None:
    """The mean loss of :func:`descent` after the last three rounds."""
    factor = min(10.0, abs(1 - server_step_size * (1 - (1 - step_size) ** 2)))  # may overflow
    after = [0.5 + factor ** (2 * k) for k in range(rounds + 1)]
    last = after[-min(3, rounds) :]
    return None if max(after) > 15 else sum(last) / len(last)


@pytest.mark.parametrize("step_size", [0.001, 0.01, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("rounds", [60, 300])
def test_the_best_of_all_points_of_the_lattice(step_size: float, rounds: int) -> None:
    found = descent(step_size=step_size, rounds=rounds, share=1.0)
    for trial in found.tried:
        want = exact(trial.step_size, trial.server_step_size, trial.rounds)
        assert trial.loss == (None if want is None else pytest.approx(want, rel=1e-9))
    last = found.tried[-1].rounds
    axes = Axis((step_size,), WIDEN), Axis((1.0,), WIDEN)
    everywhere = [exact(s, g, last) for s in axes[0].values for g in axes[1].values]
    lowest = min(loss for loss in everywhere if loss is not None)
    assert found.complete
    assert found.start == pytest.approx(1.5)
    assert found.loss <= lowest + 0.01 * (found.start - lowest) + 1e-9


@given(
    product=st.floats(-3.4, 3.4), server=st.floats(-2.4, 2.4), steepness=st.floats(1.0, 100.0),
    first=st.sampled_from([0.1, 1.0]),
)  # fmt: skip
def test_a_search_that_trades_follows_a_narrow_valley(
    product: float, server: float, steepness: float, first: float
) -> None:
    """The loss is steep across the curve of equal products, and flat along it."""
    axes = Axis((first,), 10**6), Axis((1.0,), 10**6)
    lattice = Lattice(axes, trade=True)

    def loss(point: Point) -> float:
        at = [axis.values.index(x) - axis.values.index(axis.middle) for axis, x in zip(axes, point)]
        return steepness * (sum(at) - product) ** 2 + (at[1] - server) ** 2

    found = lattice.best(descend(lattice, loss))
    everywhere = [(s, g) for s in axes[0].values for g in axes[1].values]
    assert loss(found) == min(map(loss, everywhere))


def test_a_search_along_the_axes_would_stop_in_the_valley() -> None:
    axes = Axis((1.0,)), Axis((1.0,))

    def loss(point: Point) -> float:
        return 10 * abs(math.log10(math.prod(point))) + abs(math.log10(point[1]) - 1)

    plain, trading = (Lattice(axes, trade) for trade in (False, True))
    assert plain.best(descend(plain, loss)) == (1.0, 1.0)
    assert trading.best(descend(trading, loss)) == (0.1, 10.0)


def test_the_runs_that_confirm_do_not_let_a_schedule_decay() -> None:
    asked: list[int] = []

    def schedule(round: int) -> float:
        asked.append(round)
        return 0.1

    found = descent(step_size=schedule, rounds=1000)
    assert [t.confirms for t in found.tried] == [False] * (len(found.tried) - 2) + [True] * 2
    assert max(asked) > 900
    assert max(asked[-found.tried[-1].rounds :]) in range(200, 250)  # the first quarter


# Which point is chosen ----------------------------------------------------------------------------


class Table(ShortRuns):
    """Short runs whose losses are given by a function."""

    def __init__(self, loss: Callable[[float, float, int], float | None]) -> None:
        self.start, self._given = 1.0, loss

    def try_out(
        self, step_size: float, server_step_size: float, rounds: int, confirms: bool = False
    ) -> Trial:
        found = self._given(step_size, server_step_size, rounds)
        return Trial(step_size, server_step_size, rounds, confirms, found, rounds, rounds)


def searched(
    loss: Callable[[float, float, int], float | None], budget: int = 240, adaptive: bool = False
) -> Point:
    search = _Search(Table(loss), Journal(None, ""), budget, adaptive)
    point, _ = search.search((0.1, 1.0), 10, 1000)
    assert search.spent <= budget
    return point


def nearness(x: float, best: float) -> float:
    return 0.1 * abs(math.log(x / best, SPACING))


def test_what_diverges_in_a_longer_run_is_not_returned() -> None:
    def loss(step: float, server: float, rounds: int) -> float | None:
        diverges = step * server > 0.5 and rounds > 10
        return None if diverges else nearness(step * server, 1.0)

    assert searched(loss) == (0.32, 1.0)


def test_what_is_better_in_a_longer_run_wins() -> None:
    def loss(step: float, server: float, rounds: int) -> float:
        return nearness(step * server, 1.0 if rounds <= 10 else 0.1)

    assert searched(loss) == (0.32, 1.0)  # the best one of the search, or the next smaller


def test_of_nearly_equal_points_the_smaller_wins() -> None:
    def loss(step: float, server: float, rounds: int) -> float:
        return 0.1 + nearness(min(step * server, 0.1), 0.1) - 0.001 * (step == 0.32)

    assert searched(loss) == (0.1, 1.0)


@pytest.mark.parametrize("rounds", [3, 10])
def test_if_all_points_of_a_stage_diverge_smaller_ones_are_tried(rounds: int) -> None:
    def loss(step: float, server: float, now: int) -> float | None:
        return None if now >= rounds and step > 2e-4 else 0.5

    assert searched(loss) == (0.0001, 1.0)


def test_an_adaptive_server_is_searched_first() -> None:
    seen = []

    def loss(step: float, server: float, rounds: int) -> float:
        seen.append((step, server))
        return nearness(server, 10.0) + nearness(step, 0.1)

    assert searched(loss, adaptive=True) == (0.1, 10.0)
    assert {step for step, _ in seen[:5]} == {0.1}


# Cost ---------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every round that is simulated."""
    done: list[int] = []
    simulate = rounds.simulate

    def counting(*args: Any) -> Iterator[Any]:
        states = simulate(*args)
        while True:
            done.append(1)  # a round that fails costs as well
            try:
                yield next(states)
            except StopIteration:
                done.pop()
                return

    monkeypatch.setattr(short_runs, "simulate", counting)
    return done


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("rounds", [1, 2, 7, 40, 100])
@pytest.mark.parametrize("step_size", [0.001, 0.1, 30.0])
def test_the_budget_is_kept(
    share: float, rounds: int, step_size: float, counted: list[int]
) -> None:
    found = descent(step_size=step_size, rounds=rounds, share=share)
    assert found.rounds_spent == len(counted) == sum(trial.rounds_done for trial in found.tried)
    assert found.share == found.rounds_spent / rounds
    assert found.rounds_spent <= max(math.floor(share * rounds), 15)
    assert len(found.tried) >= 5
    assert found.local_steps <= 8 * found.rounds_spent
    best = next(t for t in reversed(found.tried) if t.loss == found.loss)
    assert (best.step_size, best.server_step_size) == (found.step_size, found.server_step_size)


def test_a_run_that_diverges_is_stopped() -> None:
    found = descent(step_size=100.0, rounds=1000)
    (first, *_) = found.tried
    assert (first.loss, first.rounds_done) == (None, 1)


def test_if_all_diverge_it_says_so(counted: list[int]) -> None:
    with pytest.raises(FedShuffleError, match="smaller") as error:
        descent(step_size=1e9, rounds=10)
    assert "1e+06 to 1e+09" in str(error.value)
    assert len(counted) <= 21


def test_test_data_and_the_given_model_are_not_touched() -> None:
    model, before = PointModel(2), torch.zeros(2, dtype=torch.float64)
    data = Federation.from_arrays(TARGETS, sizes=[1] * 4)
    tune(model, data, loss=half_squared_distance, rounds=20)
    assert torch.equal(model.x.detach(), before)


# Every kind of run --------------------------------------------------------------------------------


def classes(**options: Any) -> TunedStepSizes:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 3, generator=generator)
    labels = (inputs[:, 0] + 0.3 * inputs[:, 1] > 0).long()
    equal = options.pop("equal", False)
    data = Federation.from_arrays(inputs, labels, sizes=[6] * 4 if equal else [2, 4, 6, 12])
    settings: dict[str, Any] = {"loss": losses.cross_entropy, "rounds": 6, "clients": 3, **options}
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = tune(model, data, **settings)
    kept = {k: v for k, v in settings.items() if k not in ("clients", "share", "out")}
    history = train(model, data, **kept | dict(found.settings)).history
    assert math.isfinite(history[-1]["update_norm"])
    return found


@pytest.mark.parametrize("name", [method.name for method in methods.available()])
def test_every_method(name: str) -> None:
    method = methods.get(name)
    found = classes(method=method, equal=method.balanced_only)
    assert found.loss <= found.start
    assert found.tried[0].server_step_size == method.server.usual_step_size


@pytest.mark.parametrize(
    "options",
    [
        {"method": "scaffold", "sampling": "uniform:2", "channel": "float16"},
        {"sampling": "uniform:2", "channel": "topk:0.5+ef", "down_channel": "qsgd:8"},
        {"sampling": "optimal:2"},
        {"sampling": "independent:0.5,0.5,0.9,1", "channel": "qsgd:4"},
        {"method": methods.get("fedshuffle").with_momentum(fedshuffle.MVR(0.2))},
        {"engine": "vectorized", "work": LocalWork(epochs=2, batch_size=2)},
        {"engine": "auto"},
        {"step_size": "warmup:2+cosine:0.1"},
        {"step_size": lambda round: 0.1 / (round + 1), "server_step_size": "inverse_time:1:5"},
    ],
    ids=str,
)
def test_every_kind_of_run(options: dict[str, Any]) -> None:
    assert classes(**options).loss <= math.log(2)


def test_schedules_keep_their_shape() -> None:
    found = descent(step_size="warmup:3+cosine:0.1", server_step_size=lambda round: 2.0)
    assert found.settings["step_size"] == f"warmup:3+cosine:{found.step_size:g}"
    assert found.settings["server_step_size"](7) == pytest.approx(found.server_step_size)


def test_short_runs_go_through_the_whole_schedule() -> None:
    """Steps only in the last fifth of the rounds: a run of the first rounds would not move."""
    found = descent(step_size=lambda round: 1e-9 + 0.1 * (round >= 80), rounds=100)
    assert min(t.loss for t in found.tried if t.loss is not None) < 1.4


def test_a_private_run_is_refused() -> None:
    with pytest.raises(FedShuffleError, match="public data"):
        classes(privacy=Privacy(clip=1.0, noise=1.0, delta=1e-3))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"share": 0}, "share"),
        ({"share": math.nan}, "share"),
        ({"share": math.inf}, "share"),
        ({"share": -1}, "share"),
        ({"rounds": 0}, "rounds"),
        ({"clients": 0}, "clients"),
        ({"step_size": -1}, "step size"),
        ({"step_size": "cosin:0.1"}, "cosine"),
        ({"method": "fedavgg"}, "fedavg"),
        ({"engine": "quick"}, "engine"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(options: dict[str, Any], names: str) -> None:
    with pytest.raises(FedShuffleError, match=names) as error:
        descent(**options)
    assert "\n" not in str(error.value)


# Again --------------------------------------------------------------------------------------------


def noisy(out: Path | None = None, seed: int = 0, **options: Any) -> TunedStepSizes:
    options = {"sampling": "uniform:2", "work": LocalWork(batch_size=2), "rounds": 50, **options}
    return classes(seed=seed, out=out, **options)


def test_the_same_arguments_give_the_same_result(tmp_path: Path) -> None:
    first = noisy()
    assert noisy(tmp_path / "out") == first
    assert [t.loss for t in noisy(seed=1).tried] != [t.loss for t in first.tried]


@pytest.mark.parametrize("finished", [0, 1, 4])
def test_an_interruption_repeats_nothing(
    finished: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, left, calls = noisy(), finished, list[float]()
    try_out = ShortRuns.try_out

    def interrupted(self: ShortRuns, *point: Any) -> Trial:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        calls.append(point[0])
        return try_out(self, *point)

    monkeypatch.setattr(ShortRuns, "try_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        noisy(tmp_path / "out")
    left = 10**9
    assert noisy(tmp_path / "out") == whole
    assert len(calls) == len(whole.tried)
    assert noisy(tmp_path / "out") == whole
    assert len(calls) == len(whole.tried)


def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    whole = noisy(tmp_path)
    file = tmp_path / "tuning.jsonl"
    text = file.read_text()
    file.write_text(text[:-20])
    assert noisy(tmp_path) == whole
    assert file.read_text() == text
    file.write_text(text[:30])
    assert noisy(tmp_path) == whole
    assert file.read_text() == text


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"rounds": 51}, {"method": "fedavg"}, {"clients": 2}, {"step_size": 0.2}],
    ids=str,
)
def test_a_journal_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    noisy(tmp_path)
    before = (tmp_path / "tuning.jsonl").read_text()
    with pytest.raises(FedShuffleError, match=r"tuning.jsonl.*another run.*Delete"):
        noisy(tmp_path, **change)
    assert (tmp_path / "tuning.jsonl").read_text() == before


@pytest.mark.parametrize(
    "line",
    ["spam", "{}", "[1]", "1", '{"settings": SETTINGS}', '{"settings": SETTINGS, "loss": "x"}'],
)
def test_a_broken_journal_is_one_line(tmp_path: Path, line: str) -> None:
    noisy(tmp_path)
    file = tmp_path / "tuning.jsonl"
    first, *rest = file.read_text().splitlines()
    line = line.replace("SETTINGS", json.dumps(json.loads(first)["settings"]))
    file.write_text("\n".join([first, line, *rest]) + "\n")
    with pytest.raises(FedShuffleError, match=r"tuning.jsonl.*line 2") as e:
        noisy(tmp_path)
    assert "\n" not in str(e.value)
    assert "Delete it" in str(e.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FedShuffleError, match="another folder"):
        noisy(tmp_path / "file")


def test_plain_data() -> None:
    found = descent(step_size=30.0)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert list(plain) == [
        "step_size", "server_step_size", "start", "loss", "tried", "rounds_spent", "share",
        "local_steps", "complete",
    ]  # fmt: skip
    assert [Trial(**trial) for trial in plain["tried"]] == list(found.tried)
    assert plain["tried"][0]["loss"] is None  # it diverged


def test_an_error_in_the_loss_is_named() -> None:
    def failing(model: nn.Module, *fields: Tensor) -> Tensor:
        raise RuntimeError("no such disk")

    with pytest.raises(FedShuffleError, match="no such disk"):
        classes(loss=failing)
