"""Metrics that are no means over examples, against scikit-learn, over all and per client."""

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from fedshuffle import Evaluation, Federation, FedShuffleError, losses, train
from fedshuffle._arrays import IGNORED
from fedshuffle.evaluation import SetMetric, from_torchmetrics

SIZES = [6, 9, 15, 12]


def problem(
    classes: int, seed: int, weights: list[float] | None = None, rounded: bool = True
) -> Federation:
    """Clients with outputs (many of them equal if rounded) and classes; all have every class."""
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(sum(SIZES), classes))
    labels = np.concatenate([rng.permutation(np.arange(size) % classes) for size in SIZES])
    outputs = outputs.round(1) if rounded else outputs
    return Federation.from_arrays(
        torch.from_numpy(outputs), torch.from_numpy(labels), sizes=SIZES, weights=weights
    )


def scikit(name: str, outputs: Any, labels: Any, weights: Any = None) -> float:
    if name == "auc" and outputs.shape[1] == 2:
        return float(roc_auc_score(labels, outputs[:, 1] - outputs[:, 0], sample_weight=weights))
    if name == "auc":
        shares = torch.from_numpy(outputs).softmax(1).numpy()
        one_hot = np.eye(outputs.shape[1])[labels]
        return float(roc_auc_score(one_hot, shares, average="macro", sample_weight=weights))
    average = "macro" if name == "f1-macro" else "binary"
    predicted = outputs.argmax(1)
    return float(f1_score(labels, predicted, average=average, sample_weight=weights))


@pytest.mark.parametrize(
    ("name", "classes"), [("auc", 2), ("auc", 3), ("f1", 2), ("f1-macro", 2), ("f1-macro", 3)]
)
@pytest.mark.parametrize("weights", [None, [3.0, 1.0, 1.0, 2.0]])
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_metrics_by_name_equal_scikit_learn(
    name: str, classes: int, weights: list[float] | None, seed: int
) -> None:
    data = problem(classes, seed, weights)
    outputs, labels = (field.numpy() for field in data.tensors())
    found = Evaluation(data, [name], batch_size=7)(nn.Identity())
    each = [scikit(name, outputs[a:b], labels[a:b]) for a, b in itertools.pairwise(data.offsets)]
    shares = np.repeat(data.weights / data.sizes, data.sizes)
    assert found[name] == pytest.approx(scikit(name, outputs, labels, shares))
    assert found[f"{name}_mean"] == pytest.approx(np.mean(each))
    assert found[f"{name}_worst_decile"] == pytest.approx(min(each))
    assert found[f"{name}_undefined"] == 0
    table = Evaluation(data, [name]).client_table(nn.Identity())
    np.testing.assert_allclose(table.metrics[name], each)


def test_one_output_is_for_class_one_against_class_zero() -> None:
    outputs = torch.tensor([[-1.0], [2.0], [0.5], [3.0]])
    for shaped in (outputs, outputs[:, 0]):
        for labels in (torch.tensor([0, 0, 1, 1]), torch.tensor([0.0, 0.0, 1.0, 1.0])):
            data = Federation.from_arrays(shaped, labels, sizes=[4])
            found = Evaluation(data, ["auc", "f1"], per_client=False)(nn.Identity())
            assert found == pytest.approx({"auc": 3 / 4, "f1": 2 * 2 / (2 * 2 + 1 + 0)})


def test_tokens_are_examples_and_ignored_ones_are_left_out() -> None:
    """The same metric where the tokens stand one by one, weighted as their clients are."""
    rng = np.random.default_rng(0)
    outputs = torch.from_numpy(rng.normal(size=(5, 3, 4)))
    targets = torch.from_numpy(rng.integers(3, size=(5, 4)))
    targets[0, 1:] = targets[4, 2] = IGNORED
    sequences = Federation.from_arrays(outputs, targets, sizes=[2, 3])
    kept = (targets != IGNORED).reshape(-1)
    flat = outputs.movedim(1, 2).reshape(-1, 3)[kept], targets.reshape(-1)[kept]
    single = Federation.from_arrays(*flat, sizes=[5, 11], weights=[2 / 5, 3 / 5])
    names = ["auc", "f1-macro"]
    found, wanted = (Evaluation(data, names)(nn.Identity()) for data in (sequences, single))
    assert found == pytest.approx(wanted)


# Where a metric is undefined --------------------------------------------------------------------


def one_sided() -> Federation:
    """Of three clients the second has one class only, and no example of class 1."""
    outputs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 2.0], [0.0, 1.0]])
    labels = torch.tensor([1, 0, 0, 0, 1, 0])
    return Federation.from_arrays(outputs, labels, client_ids=list("aabbcc"))


@pytest.mark.parametrize(("name", "why"), [("auc", "one class"), ("f1", "class 1")])
def test_a_client_without_the_metric_is_left_out_and_counted(name: str, why: str) -> None:
    evaluation = Evaluation(one_sided(), [name])
    found = evaluation(nn.Identity())
    table = evaluation.client_table(nn.Identity())
    assert [row[2] is None for row in table.rows] == [False, True, False]
    assert found[f"{name}_undefined"] == 1
    defined = [row[2] for row in table.rows if row[2] is not None]
    assert found[f"{name}_mean"] == pytest.approx(np.mean(defined))
    assert found[f"{name}_worst_decile"] == pytest.approx(min(defined))
    assert len(table.notes) == 1
    assert why in table.notes[0]
    assert "undefined" in repr(table)
    assert [row[0] for row in table.worst(3).rows] != []
    assert "b" not in [row[0] for row in table.worst(3).rows]


@pytest.mark.parametrize(
    ("labels", "sizes", "metric", "message"),
    [
        ([0, 0, 0, 0], [2, 2], "auc", "one class"),
        ([0, 0, 1, 1], [2, 2], "auc", "every client"),
        ([0, 0, 0, 0], [2, 2], "f1", "class 1"),
    ],
)
def test_undefined_metrics_are_refused_before_training(
    labels: list[int], sizes: list[int], metric: str, message: str
) -> None:
    data = Federation.from_arrays(torch.eye(4), torch.tensor(labels), sizes=sizes)
    with pytest.raises(FedShuffleError, match=message):
        train(
            nn.Linear(4, 2),
            data,
            loss=losses.cross_entropy,
            rounds=1,
            evaluate=Evaluation(data, [metric]),
        )


def test_over_all_examples_one_class_per_client_is_fine() -> None:
    data = Federation.from_arrays(torch.eye(4)[:, :2], torch.tensor([0, 0, 1, 1]), sizes=[2, 2])
    evaluation = Evaluation(data, ["auc"], per_client=False)
    evaluation.check(nn.Linear(2, 2).double())
    assert list(evaluation(nn.Identity())) == ["auc"]


def test_a_diverged_model_is_not_called_undefined() -> None:
    data = problem(2, 0)
    evaluation = Evaluation(data, ["auc", "f1"])

    class Lost(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * math.nan

    found = evaluation(Lost())
    assert math.isnan(found["auc"])
    assert math.isnan(found["f1_mean"])
    assert found["auc_undefined"] == 0


@pytest.mark.parametrize(
    ("outputs", "labels", "message"),
    [
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 1]), "f1-macro"),
        (torch.zeros(4, 2, 2), torch.tensor([0, 1, 1, 1]), "outputs"),
        (torch.zeros(4, 2), torch.tensor([0.5, 1, 0, 1]), "0.5"),
    ],
)
def test_outputs_and_targets_that_do_not_fit_are_named(
    outputs: Tensor, labels: Tensor, message: str
) -> None:
    data = Federation.from_arrays(outputs, labels, sizes=[4])
    with pytest.raises(FedShuffleError, match=message):
        Evaluation(data, ["f1"])(nn.Identity())


# torchmetrics -----------------------------------------------------------------------------------


class MaxDistance:
    """As a class of torchmetrics: state that is updated, computed and reset."""

    higher_is_better: bool | None = False

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen.append((outputs - targets).abs().max())

    def compute(self) -> Tensor:
        return torch.stack(self.seen).max()


def regression(weights: list[float] | None = None) -> Federation:
    outputs = torch.tensor([[1.0], [2.0], [5.0], [0.0]])
    return Federation.from_arrays(outputs, torch.ones(4, 1), sizes=[2, 2], weights=weights)


def test_a_metric_of_torchmetrics_is_taken_as_it_is() -> None:
    found = Evaluation(regression(), [MaxDistance()], batch_size=1)(nn.Identity())
    assert found == {
        "max_distance": 4.0,
        "max_distance_mean": 2.5,
        "max_distance_worst_decile": 4.0,
        "max_distance_undefined": 0,
    }
    other = from_torchmetrics(MaxDistance(), name="far", higher_is_better=True)
    assert Evaluation(regression(), [other])(nn.Identity())["far_worst_decile"] == 1.0


def test_what_torchmetrics_cannot_compute_is_undefined() -> None:
    class Touchy(MaxDistance):
        def compute(self) -> Tensor:
            if len(self.seen) == 1 and float(self.seen[0]) == 1.0:
                warnings.warn("No negative samples in targets, false positive...", stacklevel=1)
                return torch.tensor(0.0)
            return super().compute()

    evaluation = Evaluation(regression(), [Touchy()])
    assert evaluation(nn.Identity())["touchy_undefined"] == 1
    assert evaluation.client_table(nn.Identity()).rows[0][2] is None


def test_metrics_of_torchmetrics_that_cannot_be_used_are_named() -> None:
    class Silent(MaxDistance):
        higher_is_better = None

    class Many(MaxDistance):
        def compute(self) -> Tensor:
            return torch.zeros(3)

    with pytest.raises(FedShuffleError, match="higher is better"):
        Evaluation(regression(), [Silent()])
    with pytest.raises(FedShuffleError, match="average"):
        Evaluation(regression(), [Many()])(nn.Identity())
    with pytest.raises(FedShuffleError, match="weight"):
        Evaluation(regression([1.0, 3.0]), [MaxDistance()])(nn.Identity())


def test_a_set_metric_of_the_user() -> None:
    spread = SetMetric("spread", lambda outputs, targets, weights: float(outputs.std()), False)
    found = Evaluation(regression(), [spread], per_client=False)(nn.Identity())
    assert found["spread"] == pytest.approx(float(torch.tensor([1.0, 2.0, 5.0, 0.0]).std()))
    with pytest.raises(FedShuffleError, match="function"):
        SetMetric("spread", 3, True)  # type: ignore[arg-type]
