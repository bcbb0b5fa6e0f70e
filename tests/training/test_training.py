import builtins
import dataclasses
import itertools
import math
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from fedshuffle import (
    MVR,
    Evaluation,
    Federation,
    FedShuffleError,
    GlobalMomentum,
    LocalWork,
    Method,
    Metric,
    Result,
    losses,
    methods,
    schedules,
    train,
)
from fedshuffle.engines import ReferenceEngine, VectorizedEngine
from fedshuffle.sampling import Independent, Listed, Uniform
from fedshuffle.state import State
from fedshuffle.training.monitoring import monitored_loss
from fedshuffle.training.rounds import Run, run_round, simulate
from tests.problems import Point, copies, half_squared_distance, quadratic, targets

FEDERATION = Federation.from_arrays(targets(12, 2), sizes=[1, 2, 3, 6])


def final(**settings: object) -> torch.Tensor:
    defaults: dict[str, object] = {"rounds": 20, "sampling": "uniform:2", "seed": 1}
    result = train(
        Point(2),
        FEDERATION,
        loss=half_squared_distance,
        **(defaults | settings),  # type: ignore[arg-type]
    )
    return parameters_to_vector(result.model.parameters()).detach()


def test_same_seed_same_trajectory_bit_for_bit() -> None:
    assert torch.equal(final(), final())
    assert not torch.equal(final(), final(seed=2))
    assert torch.equal(final(engine="vectorized"), final(engine="vectorized"))
    torch.testing.assert_close(final(), final(engine="vectorized"), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["fedshuffle-mvr", "fedavg-rr"])
def test_a_run_can_be_continued_from_any_state(name: str) -> None:
    """State is all that changes: the same rounds follow from it, bit for bit."""
    run = Run(FEDERATION, name, "uniform:2", LocalWork(batch_size=2), seed=3)
    engine = ReferenceEngine(quadratic(FEDERATION))
    states = [states[0] for states in simulate(engine, [run], 10)]
    resumed = [states[4]]
    again = Run(FEDERATION, name, "uniform:2", LocalWork(batch_size=2), seed=3)
    for _ in range(5):
        resumed = run_round(engine, [again], resumed)
    assert torch.equal(resumed[0].x, states[9].x)
    assert resumed[0].round == 10
    assert resumed[0].method_state.keys() == states[9].method_state.keys()


def test_runs_in_lockstep_do_not_touch_each_other() -> None:
    problem = quadratic(FEDERATION)
    runs = [
        Run(FEDERATION, name, Uniform(4, b), LocalWork(batch_size=2), seed=seed)
        for name, b, seed in [("fedshuffle-mvr", 2, 1), ("fedavg", 3, 2), ("fednova-rr", 1, 2)]
    ]
    engine = VectorizedEngine(problem)
    *_, together = simulate(engine, runs, 8)
    for run, state in zip(runs, together, strict=True):
        *_, (alone,) = simulate(engine, [run], 8)
        torch.testing.assert_close(state.x, alone.x, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["fedshuffle", "fedavg-rr", "fedshuffle-mvr", "fednova"])
def test_an_empty_cohort_leaves_everything_as_it_is(name: str) -> None:
    sampling = Listed(4, [((), 0.5), ((0, 1, 2, 3), 0.5)])
    run = Run(FEDERATION, name, sampling, seed=5)
    engine = ReferenceEngine(quadratic(FEDERATION))
    states = [State(engine.problem.start), *(s for (s,) in simulate(engine, [run], 30))]
    empty = 0
    for before, after in itertools.pairwise(states):
        if not len(sampling.draw(5, before.round)):
            empty += 1
            assert torch.equal(after.x, before.x)
            assert after.method_state is before.method_state
        else:
            assert not torch.equal(after.x, before.x)
    assert 0 < empty < 30


def test_tiny_inclusion_probabilities_make_mostly_empty_rounds() -> None:
    moved = final(sampling=Independent([1e-6] * 4), rounds=5)
    assert torch.equal(moved, torch.zeros(2, dtype=torch.float64))


def test_server_step_size_and_schedules() -> None:
    federation = copies([1], torch.ones(1, 1, dtype=torch.float64))
    engine = ReferenceEngine(quadratic(federation))
    # One client at 1, one step a round: x <- x + eta_g eta_l (1 - x).
    local, server = schedules.drops(0.5, 4), lambda r: 0.1 * (r + 1)
    run = Run(federation, "nastya", step_size=local, server_step_size=server)
    x = 0.0
    for r, (state,) in enumerate(simulate(engine, [run], 4)):
        x += [0.5, 0.5, 0.05, 0.005][r] * 0.1 * (r + 1) * (1 - x)
        assert float(state.x) == pytest.approx(x, rel=1e-12)


def test_a_schedule_by_name_is_that_function_of_the_round(tmp_path: Path) -> None:
    named = final(step_size="warmup:5+cosine:0.2", server_step_size="drops:0.5")
    cosine = schedules.warmed_up(schedules.cosine(0.2, 20), 5)
    assert torch.equal(named, final(step_size=cosine, server_step_size=schedules.drops(0.5, 20)))
    # A run that goes on for longer keeps the schedule it began with.
    settings: dict[str, object] = {"step_size": "cosine:0.2", "out": tmp_path / "run"}
    final(**settings)
    longer = final(**settings, rounds=25, resume=True)
    assert torch.equal(longer, final(step_size=schedules.cosine(0.2, 20), rounds=25))


def test_the_model_is_trained_on_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.equal(final(device="cpu"), final())
    assert torch.equal(final(device=torch.device("cpu")), final())
    # No GPU is needed to see where the model goes: it has no values on this device.
    with pytest.raises(FedShuffleError, match="meta"):
        final(device=torch.device("meta"))
    for name, message in (("gpu", "unknown device"), ("cuda:x", "unknown device"), (3, "device")):
        with pytest.raises(FedShuffleError, match=message):
            final(device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "cuda:1", "mps"):
        with pytest.raises(FedShuffleError, match="not available"):
            final(device=name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(FedShuffleError, match="counted from 0"):
        final(device="cuda:1")


def test_nastya_and_fedrr_are_fedshuffle_for_balanced_clients() -> None:
    federation = Federation.from_arrays(targets(6, 2), sizes=[2, 2, 2])
    engine = VectorizedEngine(quadratic(federation))
    names = ["fedrr", "nastya", "fedshuffle", "fedavg-rr", "fednova-rr"]
    runs = [Run(federation, name, server_step_size=1.3) for name in names]
    *_, states = simulate(engine, runs, 10)
    for state in states[1:]:
        torch.testing.assert_close(state.x, states[0].x, rtol=1e-12, atol=0)


def test_a_users_method_is_one_object() -> None:
    rule = dataclasses.replace(methods.get("fedshuffle").averaging)
    mine = Method("mine", "my own", rule)
    assert torch.equal(final(method=mine), final(method="fedshuffle"))


def test_evaluation_is_called_when_asked() -> None:
    result = train(
        Point(2),
        FEDERATION,
        loss=half_squared_distance,
        rounds=7,
        evaluate=lambda model: {"norm": float(parameters_to_vector(model.parameters()).norm())},
        evaluate_every=3,
    )
    assert [record["round"] for record in result.history] == list(range(1, 8))
    assert [record["round"] for record in result.history if "norm" in record] == [3, 6, 7]
    assert all(record["clients"] == 4 and record["steps"] == 12 for record in result.history)
    assert all(record["bytes_up"] == 4 * 2 * 8 for record in result.history)


def test_an_evaluation_is_given_the_loss_of_the_training() -> None:
    """One client at 1 and one step a round: the losses are 1/2 (1 - x)^2 for x = 1 - 0.9^r."""
    federation = copies([1], torch.ones(1, 1, dtype=torch.float64))
    result = train(
        Point(1),
        federation,
        loss=half_squared_distance,
        rounds=5,
        evaluate=Evaluation(federation, ["loss"]),
        evaluate_every=2,
    )
    found = {record["round"]: record["loss"] for record in result.history if "loss" in record}
    assert found == pytest.approx({r: 0.5 * 0.9 ** (2 * r) for r in (2, 4, 5)})
    other = Evaluation(federation, ["loss"], loss=lambda model, points: model.x.sum())
    result = train(Point(1), federation, loss=half_squared_distance, rounds=1, evaluate=other)
    assert result.history[0]["loss"] == pytest.approx(0.1)


def test_evaluation_mistakes_are_named_before_training(tmp_path: Path) -> None:
    calls = 0

    def loss(model: Point, points: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return half_squared_distance(model, points)

    def fails(outputs: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of the user")

    pairs = Federation.from_arrays(targets(4, 2), targets(4, 2), sizes=[4])
    for evaluation, message in [
        (Evaluation(FEDERATION, ["accuracy"]), "^evaluation before training: the examples have 1"),
        (Evaluation(pairs, [Metric("bad", fails, True)]), "before training: NotImplementedError"),
        (Evaluation(FEDERATION, [Metric("steps", fails, True)]), "may not return 'steps'"),
    ]:
        with pytest.raises(FedShuffleError, match=message):
            train(
                Point(2), FEDERATION, loss=loss, rounds=1, evaluate=evaluation, out=tmp_path / "run"
            )
    assert calls == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ["reference", "sequential"])
def test_evaluation_changes_nothing(engine: str) -> None:
    """Not even where a layer is in another mode than the model, or draws random numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Dropout(0.5))
    model[1].eval()
    federation = Federation.from_arrays(targets(6, 3), torch.arange(6) % 3, sizes=[1, 5])
    watched, alone = (
        train(
            model,
            federation,
            loss=losses.cross_entropy,
            rounds=4,
            evaluate=evaluate,
            engine=engine,
            seed=1,
        ).model
        for evaluate in (Evaluation(federation), None)
    )
    assert [module.training for module in watched.children()] == [True, False, True]
    for one, other in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "engine", ["reference", "sequential", "vectorized", "sequential:2", "sequential:2:processes"]
)
def test_an_evaluation_may_change_its_model(engine: str) -> None:
    """Personalisation fine-tunes the model, or replaces its head; training does not see it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    model[1].requires_grad_(False)
    model.register_buffer("scale", torch.ones(2))
    rng = np.random.default_rng(0)
    federation = Federation.from_arrays(
        rng.normal(size=(12, 3)), rng.integers(2, size=12), sizes=[2, 4, 6]
    )
    seen = []

    def scaled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = model(x) * model.scale
        return nn.functional.cross_entropy(outputs, y)

    def tune(model: nn.Module) -> dict[str, float]:
        seen.append(parameters_to_vector(model.parameters()).clone())
        assert isinstance(model, nn.Sequential)
        trainable = [p for p in model.parameters() if p.requires_grad]
        for tensor in [*trainable, *model.buffers()]:  # copies share what is frozen
            tensor.add_(1.0)
        model[2] = nn.Linear(4, 5)
        model.requires_grad_(False)
        return {}

    def look(model: nn.Module) -> dict[str, float]:
        seen.append(parameters_to_vector(model.parameters()).clone())
        return {}

    def trained(evaluate: Callable[[nn.Module], dict[str, float]]) -> nn.Module:
        result = train(
            model, federation, loss=scaled, rounds=3, engine=engine, evaluate=evaluate, seed=1
        )
        return result.model

    have, want = (list(trained(evaluate).state_dict().items()) for evaluate in (tune, look))
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in zip(have, want))
    assert [name for name, _ in have] == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))


def test_a_model_in_evaluation_mode_that_would_drop_something_is_named() -> None:
    federation = Federation.from_arrays(targets(6, 3), torch.arange(6) % 3, sizes=[1, 5])

    def go(model: torch.nn.Module) -> None:
        train(model, federation, loss=losses.cross_entropy, rounds=1)

    def made(share: float) -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(share))

    with pytest.warns(UserWarning, match="layer '1'"):
        go(made(0.5).eval())
    alone = made(0.5)
    alone[1].eval()  # on purpose
    go(alone)
    go(made(0.0).eval())
    go(torch.nn.Linear(3, 3).eval())


def test_the_history_as_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    result = train(
        Point(2),
        FEDERATION,
        loss=half_squared_distance,
        rounds=3,
        sampling="uniform:2",
        evaluate=lambda model: {"two": 2},
        evaluate_every=2,
    )
    frame = result.frame()
    assert frame.index.name == "round"
    assert frame.index.tolist() == [1, 2, 3]
    assert frame["two"].isna().tolist() == [True, False, False]
    for name in ("clients", "steps", "seconds", "bytes_down", "bytes_up"):
        assert frame[name].tolist() == [record[name] for record in result.history]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedShuffleError, match=r"\[frame\]"):
        result.frame()


def test_progress_is_shown_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    seen = 0

    def evaluate(model: Point) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen in (3, 4):  # twice in the third round
            raise KeyboardInterrupt
        return {"[norm]": 1.23456, "loss": 0.5 * seen}

    settings: dict[str, object] = {"evaluate": evaluate, "out": tmp_path / "run", "rounds": 3}
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            final(progress=True, resume=resume, **settings)
        bar, hint = capsys.readouterr().err.splitlines()  # no terminal: one line at the end
        assert bar.startswith("2/3 rounds")
        assert hint.startswith("Stopped after round 2")
        if not resume:
            assert "loss 1  " in bar
            assert "steps/s 0:" in bar
    final(progress=True, resume=True, **settings)
    assert "loss 2.5" in capsys.readouterr().err
    final(resume=True, **settings)
    final()
    assert capsys.readouterr() == ("", "")


class ZMQInteractiveShell:
    """By the name of its class a notebook is known."""


def test_progress_is_shown_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, page: str) -> None:
            shown.append(page)

    def display(page: str, display_id: bool) -> Handle:
        shown.append(page)
        return Handle()

    notebook = types.ModuleType("IPython.display")
    vars(notebook).update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    final(progress=True, rounds=3, evaluate=lambda model: {"<loss>": 0.5})
    assert '<progress value="0" max="3">' in shown[0]
    assert '<progress value="3" max="3">' in shown[-1]
    assert "3/3 rounds" in shown[-1]
    assert "&lt;loss&gt; 0.5" in shown[-1]
    assert capsys.readouterr() == ("", "")


def trained(**settings: Any) -> Result:
    return train(Point(2), FEDERATION, loss=half_squared_distance, rounds=30, **settings)


def test_the_repr_of_a_result_is_short() -> None:
    """Whatever the length of the history, which is a list of records with all their clients."""
    result = trained(evaluate=lambda model: {"loss": 0.25, "loss_mean": 1.0, "a<b": 2.0})
    assert len(repr(result)) < 200
    for text in ("30 rounds", "loss 0.25"):
        assert text in repr(result)
    page = result._repr_html_()
    assert len(page) < 2000
    assert "<td>0.25</td>" in page
    assert "a&lt;b" in page
    assert "30 rounds" in repr(trained())
    assert "<table" not in Result(Point(2), [{"round": 1}])._repr_html_()


def history(**metrics: Sequence[float]) -> Result:
    """A result of as many rounds as there are values."""
    rows = zip(*metrics.values(), strict=True)
    records = [{"round": r, **dict(zip(metrics, row))} for r, row in enumerate(rows, start=1)]
    return Result(Point(2), records)


def test_a_result_is_plotted() -> None:
    values = iter(range(1000))
    result = trained(
        evaluate=lambda model: {
            "loss": (k := next(values)),
            "loss_worst_decile": 2 * k,
            "other": 1,
        },
        evaluate_every=10,
    )
    axes = result.plot()
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["all examples", "worst tenth of the clients"]
    np.testing.assert_array_equal(lines["all examples"].get_xdata(), [10, 20, 30])
    np.testing.assert_array_equal(lines["all examples"].get_ydata(), [0, 1, 2])
    assert axes.get_xlabel() == "round"
    assert axes.get_ylabel() == "loss"
    assert result.plot("other", axes) is axes
    pyplot.close("all")
    with pytest.raises(FedShuffleError, match="other"):
        result.plot("othr")
    assert trained().plot().get_ylabel() == "train_loss"  # if nothing is evaluated
    pyplot.close("all")
    with pytest.raises(FedShuffleError, match="Evaluation"):
        Result(Point(2), [{"round": 1}]).plot()


def test_several_metrics_are_plotted_together() -> None:
    axes = history(loss=[3, 2, 1], accuracy=[0.1, 0.2, 0.9]).plot(["accuracy", "loss"], log=True)
    lines = axes.get_lines()
    assert [line.get_label() for line in lines] == ["accuracy", "loss"]
    assert [np.asarray(line.get_ydata()).tolist() for line in lines] == [[0.1, 0.2, 0.9], [3, 2, 1]]
    assert len({line.get_linestyle() for line in lines}) == 2
    assert len({line.get_color() for line in lines}) == 1
    assert axes.get_yscale() == "log"
    assert axes.get_ylabel() == ""
    pyplot.close("all")


def test_plots_of_odd_results() -> None:
    with pytest.raises(FedShuffleError, match="at least one"):
        history(loss=[1]).plot([])
    for values in ([0, 0], [-1, -2], [math.nan]):
        with pytest.raises(FedShuffleError, match="no positive value"):
            history(loss=values).plot(log=True)
    assert pyplot.get_fignums() == []
    axes = history(loss=[1, 0.5, 0]).plot(log=True, c="red", lw=3)
    (line,) = axes.get_lines()
    assert (line.get_color(), line.get_linewidth()) == ("red", 3)
    assert axes.get_ylim()[0] > 0
    axes = history(loss=[1]).plot(label="")
    assert axes.get_legend() is None
    low, high = axes.get_xlim()
    assert [x for x in axes.get_xticks() if low <= x <= high] == [1]  # half a round is none
    pyplot.close("all")


def test_several_results_share_a_picture() -> None:
    one, other = history(loss=[3, 2], loss_mean=[4, 3]), history(loss=[2, 1], loss_mean=[3, 2])
    axes = one.plot("loss", label="one")
    other.plot("loss", ax=axes, label="other")
    history(loss=[5]).plot("loss", axes, label="short", color="black", linewidth=3)
    lines = axes.get_lines()
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "other", "short"]
    assert [np.asarray(line.get_ydata()).tolist() for line in lines] == [[3, 2], [2, 1], [5]]
    assert len({line.get_color() for line in lines}) == 3
    assert lines[-1].get_color() == "black"
    assert lines[-1].get_marker() == "o"  # one point is no line
    assert axes.get_yscale() == "linear"
    assert axes.get_ylabel() == "loss"
    axes = one.plot(label="one")
    labels = [line.get_label() for line in axes.get_lines()]
    assert labels == ["one, all examples", "one, mean over clients"]
    pyplot.close("all")
    assert one.plot("loss").get_legend() is None  # one line needs none
    pyplot.close("all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "fedshufle"}, "'fedshuffle'"),
        ({"sampling": "uniform:9"}, "clients is 9.*from 1 to 4"),
        ({"sampling": Uniform(5, 2)}, "5 clients"),
        ({"step_size": 0.0}, "step size"),
        ({"step_size": float("nan")}, "nan"),
        ({"server_step_size": -1.0}, "server step size"),
        ({"step_size": lambda r: 0.1 - 0.05 * r}, "step size in round 2"),
        ({"seed": -1}, "seed is -1"),
        ({"rounds": 0}, "rounds is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"engine": "warp"}, "unknown engine"),
        ({"engine": None}, "engine"),
        ({"engine": "sequential:x"}, "sequential:x"),
        ({"engine": "sequential:0"}, "workers is 0"),
        ({"sampling": 2}, "sampling"),
        ({"sampling": None}, "sampling"),
        ({"work": {}}, "work"),
        ({"method": 5}, "method"),
        ({"step_size": "fast"}, "unknown step-size schedule"),
        ({"evaluate": {"loss": 1}}, "evaluate"),
        ({"evaluate": lambda model: {"round": 1}}, "may not return 'round'"),
        ({"evaluate": lambda model: {"loss": "low"}}, "metric 'loss'"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        final(**settings)


def test_weight_decay_is_part_of_the_objective() -> None:
    """With 1/2 |x - b|^2 + lambda/2 |x|^2 at every client the optimum shrinks by 1 + lambda."""
    points = targets(2, 2)
    federation = copies([2, 2], points)
    work = LocalWork(weight_decay=0.5)
    runs = [
        Run(federation, methods.get("fedshuffle").with_momentum(momentum), "full", work, 0.05)
        for momentum in (None, MVR(0.2), GlobalMomentum(0.2))
    ]
    *_, states = simulate(VectorizedEngine(quadratic(federation)), runs, 300)
    for state in states:
        torch.testing.assert_close(state.x, points.mean(0) / 1.5, rtol=0, atol=1e-6)


def test_step_scales_are_those_of_the_smallest_and_the_largest_client() -> None:
    assert Run(Federation.from_sizes([2, 88]), "fedshuffle").step_scales() == (1.0, 44.0)


def test_the_training_loss_shows_divergence_before_the_other() -> None:
    assert monitored_loss(["accuracy", "loss", "training_loss"]) == "training_loss"
    assert monitored_loss(["accuracy"]) is None
