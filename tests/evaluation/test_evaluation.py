"""Metrics against closed forms, and per client against a plain loop."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedshuffle import Evaluation, Federation, FedShuffleError, Metric, losses
from fedshuffle._arrays import IGNORED
from fedshuffle.evaluation import ClientTable, Evaluations
from tests.problems import Point, half_squared_distance, targets

SIZES = [1, 7, 2, 30, 5, 1, 1, 3, 9, 4, 2]  # eleven clients: the worst tenth are two


def logits(n: int, classes: int = 6, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, classes)))


def labels(n: int, classes: int = 6, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(classes, size=n))


def classification(weights: list[float] | None = None) -> Federation:
    n = sum(SIZES)
    return Federation.from_arrays(logits(n), labels(n), sizes=SIZES, weights=weights)


def by_hand(
    data: Federation, value: Callable[[Tensor, Tensor], float], higher_is_better: bool
) -> list[float]:
    """Over the whole, mean over clients, worst decile: one client after another."""
    inputs, classes = data.tensors()
    found = []
    for first, last in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        found.append(value(inputs[first:last], classes[first:last]))
    whole = sum(float(w) * v for w, v in zip(data.weights, found, strict=True))
    worst = sorted(found, reverse=not higher_is_better)[: math.ceil(len(found) / 10)]
    return [whole, sum(found) / len(found), sum(worst) / len(worst)]


def accuracy(scores: Tensor, classes: Tensor) -> float:
    return sum(int(s.argmax()) == int(c) for s, c in zip(scores, classes)) / len(classes)


def top_3(scores: Tensor, classes: Tensor) -> float:
    best = [set(s.topk(3).indices.tolist()) for s in scores]
    return sum(int(c) in b for b, c in zip(best, classes)) / len(classes)


def entropy(scores: Tensor, classes: Tensor) -> float:
    picked = [float(s.log_softmax(0)[c]) for s, c in zip(scores, classes)]
    return -sum(picked) / len(picked)


def opaque(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    """The cross-entropy as a user writes it: a mean, and nothing else to be seen."""
    return functional.cross_entropy(model(inputs), classes)


# Closed forms -----------------------------------------------------------------------------------


def test_accuracy_top_k_and_perplexity_by_hand() -> None:
    # Outputs log p, so that the cross-entropy is -log p of the target and perplexities are simple.
    p = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 8, 1 / 8, 3 / 4], [1 / 2, 3 / 8, 1 / 8]])
    data = Federation.from_arrays(p.double().log(), torch.tensor([0, 1, 2]), sizes=[1, 2])
    found = Evaluation(data, ["accuracy", "top-1", "top-2", "top-3", "perplexity"])(nn.Identity())
    assert found == pytest.approx(
        {
            "accuracy": 1 / 3,  # the first is right, the others are not
            "accuracy_mean": 1 / 2,
            "accuracy_worst_decile": 0,
            "top-1": 1 / 3,
            "top-1_mean": 1 / 2,
            "top-1_worst_decile": 0,
            "top-2": 1 / 3,  # in the second row class 0 comes before its equal, class 1
            "top-2_mean": 1 / 2,
            "top-2_worst_decile": 0,
            "top-3": 1,
            "top-3_mean": 1,
            "top-3_worst_decile": 1,
            "perplexity": (2 * 8 * 8) ** (1 / 3),
            "perplexity_mean": (2 + 8) / 2,  # clients: 2, and the root of 8 times 8
            "perplexity_worst_decile": 8,
        }
    )


def test_weights_are_those_of_the_federation() -> None:
    scores, classes = torch.eye(3, dtype=torch.float64), torch.tensor([0, 0, 2])
    data = Federation.from_arrays(scores, classes, sizes=[1, 2], weights=[3, 1])
    found = Evaluation(data, ["accuracy"])(nn.Identity())
    assert found["accuracy"] == pytest.approx(0.75 * 1 + 0.25 * 0.5)
    assert found["accuracy_mean"] == pytest.approx(0.75)


def test_perplexity_over_all_examples_is_the_exponential_of_the_weighted_mean() -> None:
    p = torch.tensor([[1 / 2, 1 / 2], [1 / 8, 7 / 8]], dtype=torch.float64)
    data = Federation.from_arrays(p.log(), torch.tensor([0, 0]), sizes=[1, 1], weights=[2, 1])
    found = Evaluation(data, ["perplexity"])(nn.Identity())
    assert found["perplexity"] == pytest.approx(2 ** (2 / 3) * 8 ** (1 / 3))


def test_tokens_of_a_client_have_equal_weight_and_ignored_ones_none() -> None:
    # Sequences of 3 tokens over 2 classes; outputs are (batch, classes, time).
    right, wrong, none = 0, 1, IGNORED
    classes = torch.tensor([[right, wrong, none], [right, right, right], [wrong, none, none]])
    p = torch.tensor([3 / 4, 1 / 4], dtype=torch.float64)
    outputs = p.log().reshape(1, 2, 1).repeat(3, 1, 3)
    data = Federation.from_arrays(outputs, classes, sizes=[2, 1])
    for batch_size in (1, 2, 3):
        evaluation = Evaluation(
            data,
            ["accuracy", "loss", "perplexity"],
            loss=losses.cross_entropy,
            batch_size=batch_size,
        )
        found = evaluation(nn.Identity())
        assert found["accuracy"] == pytest.approx(2 / 3 * 4 / 5 + 1 / 3 * 0)
        assert found["accuracy_mean"] == pytest.approx(2 / 5)
        loss = -(4 * math.log(3 / 4) + math.log(1 / 4)) / 5
        assert found["loss_mean"] == pytest.approx((loss + math.log(4)) / 2)
        assert found["perplexity_worst_decile"] == pytest.approx(4)


def test_soft_targets_have_a_cross_entropy() -> None:
    p = torch.tensor([[1 / 2, 1 / 2], [1 / 8, 7 / 8]], dtype=torch.float64)
    data = Federation.from_arrays(p.log(), p, sizes=[1, 1])
    found = Evaluation(data, ["loss"], loss=losses.cross_entropy)(nn.Identity())
    second = -(math.log(1 / 8) + 7 * math.log(7 / 8)) / 8
    assert found["loss"] == pytest.approx((math.log(2) + second) / 2)


def test_among_equal_outputs_the_first_counts() -> None:
    """A model with equal outputs is right about the first class only, as for argmax."""
    data = Federation.from_arrays(torch.zeros(4, 4), torch.arange(4), sizes=[4])
    found = Evaluation(data, ["accuracy", "top-3"], per_client=False)(nn.Identity())
    assert found == {"accuracy": 0.25, "top-3": 0.75}


# Per client against a loop ----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 7, 1024])
@pytest.mark.parametrize("weights", [None, list(range(1, 12))], ids=["by size", "weighted"])
def test_every_metric_equals_a_loop_over_clients(
    batch_size: int, weights: list[float] | None
) -> None:
    data = classification(weights)
    wanted = {
        "loss": by_hand(data, entropy, False),
        "accuracy": by_hand(data, accuracy, True),
        "top-3": by_hand(data, top_3, True),
        "perplexity": by_hand(data, lambda s, c: math.exp(entropy(s, c)), False),
    }
    wanted["perplexity"][0] = math.exp(wanted["loss"][0])
    names = [f"test_{k}{part}" for k in wanted for part in ("", "_mean", "_worst_decile")]
    values = [value for values in wanted.values() for value in values]
    for loss in (losses.cross_entropy, opaque):
        settings: dict[str, Any] = {"loss": loss, "batch_size": batch_size, "prefix": "test_"}
        evaluation = Evaluation(data, list(wanted), **settings)
        assert evaluation.names == names
        assert evaluation(nn.Identity()) == pytest.approx(dict(zip(names, values)), rel=1e-12)
        whole = Evaluation(data, list(wanted), per_client=False, **settings)
        assert whole(nn.Identity()) == pytest.approx(
            {f"test_{k}": v[0] for k, v in wanted.items()}, rel=1e-12
        )


@given(st.lists(st.one_of(st.floats(-5, 5), st.just(math.nan)), min_size=1, max_size=40))
def test_the_worst_tenth_is_rounded_up_and_nan_is_worst(values: list[float]) -> None:
    many = math.ceil(len(values) / 10)
    low = sorted(values, key=lambda v: -math.inf if math.isnan(v) else v)[:many]
    high = sorted(values, key=lambda v: -math.inf if math.isnan(v) else -v)[:many]
    for better, wanted in ((True, low), (False, high)):
        sizes = np.ones(len(values), np.int64)
        table = ClientTable(sizes.tolist(), sizes, {"m": np.array(values)}, {"m": better})
        assert table.spread("m")[1] == pytest.approx(np.mean(wanted), nan_ok=True)
        assert table.spread("m")[0] == pytest.approx(np.mean(values), nan_ok=True)


# How the model is run ---------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, and leaves the outputs as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)  # its precision is that of the model
        self.batches: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        assert inputs.dtype == torch.float32
        assert not self.training
        assert not torch.is_grad_enabled()
        self.batches.append(len(inputs))
        return inputs


def test_the_model_runs_once_per_batch_whatever_is_measured() -> None:
    model, data = Counting(), classification()
    metrics = ["loss", "accuracy", "top-1", "top-3", "perplexity"]
    Evaluation(data, metrics, loss=losses.cross_entropy, batch_size=30)(model)
    assert model.batches == [30, 30, 5]


def test_batches_of_an_opaque_loss_cross_clients_only_where_that_is_harmless() -> None:
    data = classification()
    for per_client, weighted, wanted in [
        (True, data, [1, 7, 2, 10, 10, 10, 5, 1, 1, 3, 9, 4, 2]),
        (False, classification(list(range(1, 12))), [1, 7, 2, 10, 10, 10, 5, 1, 1, 3, 9, 4, 2]),
        (False, data, [10, 10, 10, 10, 10, 10, 5]),
    ]:
        model = Counting()
        Evaluation(weighted, ["loss"], loss=opaque, per_client=per_client, batch_size=10)(model)
        assert model.batches == wanted


def test_every_layer_returns_to_the_mode_it_was_in() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.9), nn.Dropout(0.9)).double()
    model[2].eval()  # frozen by the user
    evaluation = Evaluation(classification(), loss=losses.cross_entropy)
    assert evaluation(model) == evaluation(model)  # no dropout

    def fails(outputs: Tensor, classes: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Evaluation(classification(), [Metric("bad", fails, True)])(model)
    assert [module.training for module in model] == [True, True, False]
    assert torch.is_grad_enabled()


def test_a_memory_mapped_federation_is_read_batch_by_batch(tmp_path: Path) -> None:
    """The arrays are opened read-only, and never as a whole."""
    n = sum(SIZES)
    np.save(tmp_path / "x.npy", logits(n).numpy())
    np.save(tmp_path / "y.npy", labels(n).numpy())
    largest = 0

    class Mapped(np.memmap[Any, np.dtype[Any]]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal largest
            rows = super().__getitem__(index)
            if isinstance(index, slice):
                largest = max(largest, len(rows))
            return rows

    fields = tuple(
        np.load(tmp_path / name, mmap_mode="r").view(Mapped) for name in ("x.npy", "y.npy")
    )
    known = classification()
    data = Federation(known.sizes, known.weights, known.offsets, fields, known.ids)
    settings: dict[str, Any] = {"loss": losses.cross_entropy, "batch_size": 8}
    assert Evaluation(data, **settings)(nn.Identity()) == Evaluation(known, **settings)(
        nn.Identity()
    )
    assert largest == 8


def test_all_fields_but_the_last_go_to_the_model() -> None:
    class Sum(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return first + second

    n = sum(SIZES)
    whole, classes = logits(n), labels(n)
    part = torch.ones_like(whole)
    data = Federation.from_arrays(whole - part, part, classes, sizes=SIZES)
    found = Evaluation(data, loss=losses.cross_entropy)(Sum())
    wanted = Evaluation(classification(), loss=losses.cross_entropy)(nn.Identity())
    assert found == pytest.approx(wanted, rel=1e-12)


def test_a_metric_of_the_user() -> None:
    data = Federation.from_arrays([[0.0, 1.0], [2.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]], sizes=[1, 1])
    gaps = Metric("gap", lambda outputs, aims: (outputs - aims).abs(), higher_is_better=False)
    rms = Metric("rms", lambda outputs, aims: (outputs - aims) ** 2, False, finish=np.sqrt)
    twice = Metric("last", lambda o, t: (o, torch.tensor([[0, 2]] * len(o))), True)
    found = Evaluation(data, [gaps, rms, twice])(nn.Identity())
    assert found == pytest.approx(
        {
            "gap": 1.0,  # gaps 1, 0 and 1, 2
            "gap_mean": 1.0,
            "gap_worst_decile": 1.5,
            "rms": math.sqrt(6 / 4),
            "rms_mean": (math.sqrt(1 / 2) + math.sqrt(5 / 2)) / 2,
            "rms_worst_decile": math.sqrt(5 / 2),
            "last": 2.0,
            "last_mean": 2.0,
            "last_worst_decile": 1.0,
        }
    )


def test_an_opaque_loss_needs_no_targets() -> None:
    data = Federation.from_arrays(targets(4, 2), sizes=[1, 3])
    model = Point(2)
    found = Evaluation(data, ["loss"], loss=half_squared_distance)(model)
    halves = data.fields[0].square().sum(1) / 2
    assert found["loss"] == pytest.approx(float(halves.mean()))
    assert found["loss_mean"] == pytest.approx(float((halves[0] + halves[1:].mean()) / 2))


# A model that has diverged ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_model_is_reported_as_such(bad: float) -> None:
    scores = torch.tensor([[1.0, 0.0], [bad, bad], [0.0, 1.0]])
    data = Federation.from_arrays([[0.0], [1.0], [2.0]], [0, 0, 1], sizes=[1, 1, 1])

    class Lookup(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return scores[rows[:, 0].long()]

    found = Evaluation(data, ["loss", "accuracy"], loss=losses.cross_entropy)(Lookup())
    assert [math.isnan(value) for name, value in found.items() if "loss" in name] == [True] * 3
    right = 2 / 3 if math.isnan(bad) else 1.0  # of two infinities the first is the larger
    assert found["accuracy"] == pytest.approx(right)


def test_a_perplexity_may_be_infinite() -> None:
    data = Federation.from_arrays([[0.0, 1e4]], [0], sizes=[1])
    assert Evaluation(data, ["perplexity"])(nn.Identity())["perplexity_mean"] == math.inf


# Losses -----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 99), time=st.integers(0, 3))
def test_a_loss_is_the_mean_of_its_values(seed: int, time: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (4, 3, time) if time else (4, 3)
    outputs = torch.from_numpy(rng.normal(size=shape))
    classes = torch.from_numpy(rng.integers(3, size=(4, time) if time else 4))
    classes[0] = IGNORED
    slow = losses.MeanLoss(losses.cross_entropy.each)
    wanted = losses.cross_entropy(nn.Identity(), outputs, classes)
    torch.testing.assert_close(slow(nn.Identity(), outputs, classes), wanted)


def test_squared_error_does_not_broadcast() -> None:
    outputs = torch.tensor([[1.0], [2.0]])
    assert float(losses.squared_error(nn.Identity(), outputs, torch.zeros(2, 1))) == 1.25
    assert float(losses.squared_error(nn.Flatten(0), outputs, torch.zeros(2))) == 1.25
    with pytest.raises(FedShuffleError, match="shape"):
        losses.squared_error(nn.Identity(), outputs, torch.zeros(2))


# Mistakes ---------------------------------------------------------------------------------------

MEAN_ACCURACY = Metric("accuracy_mean", lambda outputs, classes: classes, True)
MEAN = Metric("mean", lambda outputs, classes: outputs.mean(), True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": [1, 2]}, "data .*Federation"),
        ({"data": Federation.from_sizes([1, 2])}, "sizes only"),
        ({"metrics": "accuracy"}, "list"),
        ({"metrics": []}, "list"),
        ({"metrics": ["acuracy"]}, "'accuracy'"),
        ({"metrics": ["top-0"]}, "'top-0'"),
        ({"metrics": ["top5"]}, "'top-5'"),
        ({"metrics": [accuracy]}, "Metric"),
        ({"metrics": [3]}, "metric .*str"),
        ({"metrics": ["accuracy", "accuracy"]}, "two metrics"),
        (
            {"metrics": ["accuracy", MEAN_ACCURACY]},
            "accuracy_mean",
        ),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"loss": "mse"}, "'mse'"),
        ({"prefix": None}, "prefix"),
        ({"metrics": ["loss"]}, "needs the loss"),
        ({"metrics": ["top-7"]}, "top-7"),
        ({"metrics": [MEAN]}, "'mean'"),
        ({"metrics": ["loss"], "loss": lambda m, x, y: m(x)}, "loss gave .*one number"),
        (
            {"metrics": ["accuracy"], "data": Federation.from_arrays([[1.0]], [1.0], sizes=[1])},
            "need outputs .*float",
        ),
        (
            {"metrics": ["accuracy"], "data": Federation.from_arrays([1.0], [1], sizes=[1])},
            "targets",
        ),
        (
            {"metrics": ["accuracy"], "data": Federation.from_arrays([1.0], sizes=[1])},
            "1 field",
        ),
    ],
)
@pytest.mark.parametrize("early", [True, False], ids=["check", "call"])
def test_mistakes_are_named(settings: dict[str, Any], message: str, early: bool) -> None:
    def evaluate() -> None:
        evaluation = Evaluation(**({"data": classification()} | settings))
        evaluation.check(nn.Identity()) if early else evaluation(nn.Identity())

    with pytest.raises(FedShuffleError, match=message):
        evaluate()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((5, accuracy, True), "name"),
        (("m", 5, True), "function.*5"),
        (("m", accuracy, "yes"), "higher_is_better"),
        (("m", accuracy, True, 3), "function.*3"),
    ],
)
def test_bad_metrics_are_named(settings: tuple[Any, ...], message: str) -> None:
    with pytest.raises(FedShuffleError, match=message):
        Metric(*settings)


def test_a_client_without_a_target_that_counts_is_named() -> None:
    data = Federation.from_arrays(
        torch.eye(3), torch.tensor([0, -100, -100]), client_ids=["a", "b", "b"]
    )
    with pytest.raises(FedShuffleError, match="client 'b'"):
        Evaluation(data, ["accuracy"])(nn.Identity())


def test_several_evaluations() -> None:
    data = Federation.from_arrays(torch.eye(2), torch.tensor([0, 0]), sizes=[1, 1])
    accuracy = Evaluation(data, ["accuracy"])
    trained = Evaluation(data, ["loss"], prefix="training_", per_client=False)
    both = Evaluations(accuracy, trained).with_loss(losses.cross_entropy)
    found = both(torch.nn.Identity())
    assert found["accuracy"] == 0.5
    assert found["training_loss"] == pytest.approx(math.log(1 + math.e) - 0.5)
    assert list(found) == both.names == [*accuracy.names, "training_loss"]
    assert both.higher_is_better == dict.fromkeys(accuracy.names, True) | {"training_loss": False}
    with pytest.raises(FedShuffleError, match="'accuracy'"):
        Evaluations(accuracy, accuracy)
