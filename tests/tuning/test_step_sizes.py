"""Step sizes from short runs: the right ones, at a bounded cost, and the same ones again."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
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
from fedshuffle.tuning.search import CAUTION, EQUAL, SPACING, Axis, Lattice, Point, descend
from fedshuffle.tuning.short_runs import LAST, ShortRuns
from fedshuffle.tuning.step_sizes import MIN_ROUNDS, MIN_TRIALS, RATIOS, TRIALS, WIDEN, _Search
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


def exact(step_sizes: Iterable[float], server_step_sizes: Iterable[float]) -> float | None:
    """The mean loss of :func:`descent` after the last rounds, at the step sizes of each round."""
    after, squared = list[float](), 1.0
    for step_size, server_step_size in zip(step_sizes, server_step_sizes, strict=True):
        squared *= min(10.0, abs(1 - server_step_size * (1 - (1 - step_size) ** 2))) ** 2
        after.append(0.5 + squared)
    return None if max(after) > 15 else fmean(after[-LAST:])


def constant(step_size: float, server_step_size: float, rounds: int) -> float | None:
    return exact([step_size] * rounds, [server_step_size] * rounds)


@pytest.mark.parametrize("step_size", [0.001, 0.1, 30.0])
@pytest.mark.parametrize("share", [4.0, 40.0])
def test_the_best_of_all_points_of_each_search(step_size: float, share: float) -> None:
    found = descent(step_size=step_size, share=share)
    for trial in found.tried:
        want = constant(trial.step_size, trial.server_step_size, trial.rounds)
        assert trial.loss == (None if want is None else pytest.approx(want, rel=1e-9))
    stages = {trial.stage: trial for trial in reversed(found.tried)}
    starts = [(stages[k].step_size, stages[k].server_step_size) for k in sorted(stages)]
    ends = [*starts[1:], (found.step_size, found.server_step_size)]
    assert len(starts) == len(RATIOS)
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        one, other = (Axis((size,), WIDEN, RATIOS[stage]).values for size in start)
        length = stages[stage].rounds
        plane = product(one, other if stage else [1.0])
        everywhere = [constant(step, server, length) for step, server in plane]
        lowest = min(loss for loss in everywhere if loss is not None)
        reached = constant(*end, length)
        assert reached is not None
        assert reached <= lowest + CAUTION * (found.start - lowest) + 1e-9
    assert found.complete or share < 40  # of the rounds of 40 runs there are enough
    assert found.start == pytest.approx(1.5)
    assert found.loss == pytest.approx(constant(*ends[-1], stages[2].rounds), rel=1e-9)


def test_a_schedule_is_a_straight_line_in_a_short_run() -> None:
    found = descent(
        step_size="warmup:5+drops:0.1", server_step_size=lambda round: 2 / (round + 1), rounds=200
    )
    ends = 0.01, 1 / 200  # the shares of the step size that are left in the last round
    for trial in found.tried:
        sizes = trial.step_size, trial.server_step_size
        lines = [
            [size * (1 - (1 - end) * r / trial.rounds) for r in range(trial.rounds)]
            for size, end in zip(sizes, ends, strict=True)
        ]
        want = exact(*lines)
        assert trial.loss == (None if want is None else pytest.approx(want, rel=1e-9))
    assert {trial.stage for trial in found.tried} == {0, 1, 2}


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


@given(
    product=st.floats(-3.4, 3.4), server=st.floats(-2.4, 2.4), steepness=st.floats(1.0, 100.0),
    valley=st.booleans(),
)  # fmt: skip
def test_a_search_that_does_both_finds_the_best_with_and_without_a_valley(
    product: float, server: float, steepness: float, valley: bool
) -> None:
    axes = Axis((0.1,), 10**6), Axis((1.0,), 10**6)

    def loss(point: Point) -> float:
        at = [axis.values.index(x) - axis.values.index(axis.middle) for axis, x in zip(axes, point)]
        return steepness * abs(at[0] + valley * at[1] - product) + abs(at[1] - server)

    lowest = min(loss((s, g)) for s in axes[0].values for g in axes[1].values)
    both = Lattice(axes, trade=True, alone=True)
    assert loss(both.best(descend(both, loss))) == lowest


def test_a_search_that_only_trades_would_miss_the_best_server_step_size() -> None:
    axes = Axis((1.0,)), Axis((1.0,))

    def loss(point: Point) -> float:
        return 10 * abs(math.log10(point[0])) + abs(math.log10(point[1]) - 1)

    trading, both = (Lattice(axes, True, alone) for alone in (False, True))
    assert trading.best(descend(trading, loss)) == (1.0, 1.0)
    assert both.best(descend(both, loss)) == (1.0, 10.0)


def test_a_search_along_the_axes_would_stop_in_the_valley() -> None:
    axes = Axis((1.0,)), Axis((1.0,))

    def loss(point: Point) -> float:
        return 10 * abs(math.log10(math.prod(point))) + abs(math.log10(point[1]) - 1)

    plain, trading = (Lattice(axes, trade) for trade in (False, True))
    assert plain.best(descend(plain, loss)) == (1.0, 1.0)
    assert trading.best(descend(trading, loss)) == (0.1, 10.0)


def test_every_search_has_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list[int]()
    simulate = rounds.simulate

    def noting(engine: Any, runs: Any, number: int) -> Iterator[Any]:
        seeds.append(runs[0].seed)
        return simulate(engine, runs, number)

    monkeypatch.setattr(short_runs, "simulate", noting)
    found = descent(seed=3)
    used = {(seed, trial.stage) for seed, trial in zip(seeds, found.tried, strict=True)}
    assert len({seed for seed, _ in used} | {3}) == 4  # one of each search, and not the run's
    assert len(used) == 3
    stages = [trial.stage for trial in found.tried]
    assert stages == sorted(stages)


# Which point is chosen ----------------------------------------------------------------------------


SHORT = 10  # rounds of the first search


class Table(ShortRuns):
    """Short runs whose losses are given by a function."""

    def __init__(self, loss: Callable[[float, float, int], float | None]) -> None:
        self.start, self._given = 1.0, loss

    def try_out(
        self, step_size: float, server_step_size: float, rounds: int, stage: int = 0
    ) -> Trial:
        found = self._given(step_size, server_step_size, rounds)
        return Trial(step_size, server_step_size, rounds, stage, found, rounds, rounds)


def searched(
    loss: Callable[[float, float, int], float | None],
    budget: int = 10**6,
    adaptive: bool = False,
    rounds: int = 1000,
) -> tuple[float, float]:
    search = _Search(Table(loss), Journal(None, ""), budget, adaptive)
    (step, server), found = search.search((0.1, 1.0), SHORT, rounds)
    assert search.spent <= budget
    tried = search.tried.values()
    own = [t for t in tried if (t.step_size, t.server_step_size) == (step, server)]
    assert all(trial.loss is not None for trial in own)
    last = max(trial.stage for trial in tried if trial.loss is not None)
    assert found in {loss(step, server, t.rounds) for t in own if t.stage == last}
    for stage in range(1, 1 + max(trial.stage for trial in tried)):
        left = budget - sum(trial.rounds for trial in tried if trial.stage < stage)
        lengths = {trial.rounds for trial in tried if trial.stage == stage}
        assert lengths == {min(rounds, max(SHORT, left // TRIALS[stage]))}
    return step, server


def units(x: float, best: float) -> float:
    """The steps of the second lattice from one value to another; those of the third are half."""
    return round(2 * math.log(x / best, SPACING)) / 2


def nearness(x: float, best: float) -> float:
    return 0.2 * abs(units(x, best))


@given(st.floats(-3, 3), st.floats(-2, 2), st.booleans())
def test_the_best_point_of_a_bowl(centre: float, server_centre: float, adaptive: bool) -> None:
    """Each step along a valley of equal products, or across it, changes the loss by up to 0.05."""

    def loss(step: float, server: float, rounds: int = 0) -> float:
        along = units(step, 0.1) if adaptive else units(step * server, 0.1)
        return 0.05 * (abs(along - centre) + abs(units(server, 1.0) - server_centre))

    reached = loss(*searched(loss, adaptive=adaptive))
    axes = Axis((0.1,), ratio=RATIOS[2]), Axis((1.0,), ratio=RATIOS[2])
    lowest = min(loss(*point) for point in product(axes[0].values, axes[1].values))
    # Either axis may be off by what counts as equal, and then the smaller point is taken.
    assert reached <= lowest + (CAUTION + 2 * EQUAL) * (1.0 - lowest) + 1e-9


@pytest.mark.parametrize(
    ("limit", "found"),
    [(0.07, 0.032), (0.11, 0.056), (0.12, 0.057), (0.4, 0.18), (0.5, 0.18), (10.0, 1.0)],
)
def test_twice_the_step_sizes_that_are_returned_are_stable(limit: float, found: float) -> None:
    def loss(step: float, server: float, rounds: int) -> float | None:
        return None if step > limit else nearness(step, 1.0) + nearness(server, 1.0)

    assert searched(loss) == pytest.approx((found, 1.0), rel=0.02)


def test_what_diverges_in_a_longer_run_is_not_returned() -> None:
    def loss(step: float, server: float, rounds: int) -> float | None:
        diverges = step * server > 0.5 and rounds > SHORT
        return None if diverges else nearness(step * server, 1.0)

    assert math.prod(searched(loss)) == pytest.approx(0.32, rel=0.05)


def test_what_diverges_in_a_short_run_is_not_returned() -> None:
    """Although its longer run, with another seed, does not diverge."""

    def loss(step: float, server: float, rounds: int) -> float | None:
        diverges = step * server > 0.5 and rounds == SHORT
        return None if diverges else nearness(step * server, 1.0)

    step, server = searched(loss)
    assert min(step, server) < 1.0


def test_what_is_better_in_a_longer_run_wins() -> None:
    def loss(step: float, server: float, rounds: int) -> float:
        return nearness(step * server, 1.0 if rounds <= SHORT else 0.032)

    assert math.prod(searched(loss)) == pytest.approx(0.032, rel=0.05)


def test_of_nearly_equal_points_the_smaller_wins() -> None:
    def loss(step: float, server: float, rounds: int) -> float:
        return 0.1 + nearness(min(step * server, 0.1), 0.1) - 0.001 * (step == 0.32)

    assert searched(loss) == (0.1, 1.0)


@pytest.mark.parametrize("rounds", [SHORT, SHORT + 1])
def test_if_all_points_of_a_search_diverge_smaller_ones_are_tried(rounds: int) -> None:
    def loss(step: float, server: float, now: int) -> float | None:
        diverges = now >= rounds and step > 2e-4
        return None if diverges else nearness(step, 1e-4) + nearness(server, 1.0)

    assert searched(loss) == (1e-4, 1.0)

    def later(step: float, server: float, now: int) -> float | None:
        diverges = now >= rounds and step * server > 0.002
        return None if diverges else nearness(step * server, 0.1)

    assert 0.001 <= math.prod(searched(later)) * 1.001 <= 0.002


def test_what_is_larger_than_a_point_that_diverged_is_not_returned() -> None:
    """If the longer runs diverge, short ones count, but not those with larger step sizes."""

    class LongOnesDiverge(Table):
        def try_out(self, *point: Any) -> Trial:
            found = super().try_out(*point)
            return replace(found, loss=None) if found.stage else found

    losses = {0.01: 0.4, 0.1: 0.3, 1.0: 0.0, 10.0: 0.2}
    runs = LongOnesDiverge(lambda step, server, rounds: losses.get(step, 0.5))
    search = _Search(runs, Journal(None, ""), (len(losses) + 2) * SHORT, adaptive=False)
    assert search.search((0.1, 1.0), SHORT, SHORT) == ((0.1, 1.0), 0.3)
    assert [trial.step_size for trial in search.tried.values()][-2:] == [1.0, 0.32]
    assert not search.complete


@pytest.mark.parametrize("adaptive", [False, True])
def test_what_moves_the_model_is_lowered_first(adaptive: bool) -> None:
    seen = []

    def loss(step: float, server: float, rounds: int) -> float | None:
        seen.append((step, server))
        limit = server / 1.0 if adaptive else step / 0.1
        return None if limit > 0.05 else nearness(step, 0.01) + nearness(server, 0.01)

    searched(loss, adaptive=adaptive)
    lowered = [(0.1, 1.0), (0.1, 0.1), (0.1, 0.01)] if adaptive else None
    assert seen[:3] == (lowered or [(0.1, 1.0), (0.01, 1.0), (0.001, 1.0)])


def test_with_an_adaptive_server_each_step_size_is_tried_alone() -> None:
    seen = set()

    def loss(step: float, server: float, rounds: int) -> float:
        seen.add((step, server))
        return nearness(server, 10.0) + nearness(step, 0.1)

    assert searched(loss, adaptive=True) == (0.1, 10.0)
    assert all(step == 0.1 or server in (1.0, 10.0) for step, server in seen)


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


@pytest.mark.parametrize("share", [0.01, 0.5, 2.0])
@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
@pytest.mark.parametrize("step_size", [0.001, 0.1, 30.0])
def test_the_budget_is_kept(
    share: float, rounds: int, step_size: float, counted: list[int]
) -> None:
    found = descent(step_size=step_size, rounds=rounds, share=share)
    assert found.rounds_spent == len(counted) == sum(trial.rounds_done for trial in found.tried)
    assert found.share == found.rounds_spent / rounds
    assert found.rounds_spent <= max(math.floor(share * rounds), MIN_TRIALS * MIN_ROUNDS)
    assert len(found.tried) >= MIN_TRIALS
    assert found.local_steps <= 8 * found.rounds_spent
    best = next(t for t in reversed(found.tried) if t.loss == found.loss)
    assert (best.step_size, best.server_step_size) == (found.step_size, found.server_step_size)


def test_a_run_that_diverges_is_stopped() -> None:
    found = descent(step_size=100.0, rounds=50)
    (first, *_) = found.tried
    assert (first.loss, first.rounds_done) == (None, 1)


def test_if_all_diverge_it_says_so(counted: list[int]) -> None:
    with pytest.raises(FedShuffleError, match="smaller") as error:
        descent(step_size=1e9, rounds=10)
    assert "1e+06 to 1e+09" in str(error.value)
    assert len(counted) <= 21


def test_the_given_model_is_not_touched() -> None:
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


KINDS = {  # the first of each kind: a search sees no more of a method
    (type(one.server), type(one.direction), one.pooled, one.balanced_only): one.name
    for one in reversed(methods.available())
}


@pytest.mark.parametrize("name", KINDS.values())
def test_every_kind_of_method(name: str) -> None:
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
        {"sampling": "uniform:2", "probabilities": "estimate"},
        {"step_size": "warmup:2+cosine:0.1"},
        {"step_size": lambda round: 0.1 / (round + 1), "server_step_size": "inverse_time:1:5"},
    ],
    ids="-".join,
)
def test_every_kind_of_run(options: dict[str, Any]) -> None:
    assert classes(**options).loss <= math.log(2)


@pytest.mark.parametrize(
    ("method", "scale"), [("fedavg-rr", 1.0), ("fedshuffle-capped:rho=2", 2.0), ("fedshuffle", 6.0)]
)
def test_it_says_how_large_the_steps_of_clients_are(method: str, scale: float) -> None:
    assert classes(method=method).largest_scale == pytest.approx(scale)  # sizes 2 to 12


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
        ({"share": "much"}, "share is 'much', but must be a number"),
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
        "local_steps", "complete", "largest_scale",
    ]  # fmt: skip
    assert [Trial(**trial) for trial in plain["tried"]] == list(found.tried)
    assert plain["tried"][0]["loss"] is None  # it diverged


def test_a_loss_that_is_not_finite_before_training_is_named(counted: list[int]) -> None:
    def broken(model: nn.Module, *fields: Tensor) -> Tensor:
        return losses.cross_entropy(model, *fields) * math.nan

    with pytest.raises(FedShuffleError, match="nan before training") as error:
        classes(loss=broken)
    assert "\n" not in str(error.value)
    assert not counted


def test_an_error_in_the_loss_is_named() -> None:
    def failing(model: nn.Module, *fields: Tensor) -> Tensor:
        raise RuntimeError("no such disk")

    with pytest.raises(FedShuffleError, match="no such disk"):
        classes(loss=failing)
