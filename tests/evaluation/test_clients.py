"""Which client does the model serve badly? The table of clients, its file, and a run's result."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedshuffle import Evaluation, Federation, FedShuffleError, losses, train
from fedshuffle.evaluation import ClientTable, Evaluations
from fedshuffle.training import Evaluate

NAMES = ["clinic, north", "gp", "<lab>"]


def federation() -> Federation:
    """Clients of 1, 2 and 3 examples; the model that repeats its input errs on the last of each."""
    owners = [NAMES[0], *[NAMES[1]] * 2, *[NAMES[2]] * 3]
    labels = torch.tensor([1, 0, 2, 0, 1, 1])
    inputs = torch.eye(3)[torch.tensor([0, 0, 0, 0, 1, 2])]
    return Federation.from_arrays(inputs, labels, client_ids=owners)


def test_the_table_equals_a_loop_over_clients() -> None:
    data = federation()
    table = Evaluation(
        data, ["loss", "accuracy"], loss=losses.cross_entropy, batch_size=2
    ).client_table(nn.Identity())
    inputs, labels = data.tensors()
    assert table.columns == ("client", "examples", "loss", "accuracy")
    assert len(table) == 3
    for k, (client, examples, loss, accuracy) in enumerate(table.rows):
        own = slice(int(data.offsets[k]), int(data.offsets[k + 1]))
        assert client == data.ids[k]
        assert examples == data.sizes[k]
        assert loss == pytest.approx(float(functional.cross_entropy(inputs[own], labels[own])))
        right = inputs[own].argmax(1) == labels[own]
        assert accuracy == pytest.approx(float(right.float().mean()))


def test_every_loss_has_a_table() -> None:
    def opaque(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(inputs), labels)

    tables = [
        Evaluation(federation(), ["loss"], loss=loss, per_client=False).client_table(nn.Identity())
        for loss in (opaque, losses.cross_entropy)
    ]
    np.testing.assert_allclose(tables[0].metrics["loss"], tables[1].metrics["loss"], rtol=1e-6)


def test_the_worst_come_first_and_nan_is_worst() -> None:
    values = np.array([0.5, math.nan, 0.1, 0.9])
    names, sizes = list("abcd"), np.ones(4, np.int64)
    high = ClientTable(names, sizes, {"accuracy": values}, {"accuracy": True})
    low = ClientTable(names, sizes, {"loss": values}, {"loss": False})
    assert high.worst(3).clients == ["b", "c", "a"]
    assert low.worst(3).clients == ["b", "d", "a"]
    with pytest.raises(FedShuffleError, match="accuracy"):
        high.worst(3, "acuracy")


def test_the_table_as_file_frame_and_html(tmp_path: Path) -> None:
    table = Evaluation(federation(), ["accuracy"]).client_table(nn.Identity())
    table.to_csv(tmp_path / "clients.csv")
    with (tmp_path / "clients.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["client", "examples", "accuracy"]
    assert {row[0] for row in rows[1:]} == set(NAMES)
    assert [float(row[2]) for row in rows[1:]] == table.metrics["accuracy"].tolist()
    frame = table.frame()
    assert frame.loc["gp", "examples"] == 2
    assert "&lt;lab&gt;" in table._repr_html_()
    assert "<lab>" not in table._repr_html_()
    with pytest.raises(FedShuffleError, match="cannot write"):
        table.to_csv(tmp_path / "clients.csv" / "below")


def test_a_long_table_is_cut_and_has_no_control_characters() -> None:
    names = [f"\x1b[31m{k}" for k in range(500)]
    table = ClientTable(names, np.ones(500, np.int64), {"loss": np.ones(500)}, {"loss": False})
    assert len(repr(table).splitlines()) < 30
    assert "480 more" in repr(table)
    assert "480 more" in table._repr_html_()
    assert "\x1b" not in repr(table)


def test_a_run_returns_the_table(tmp_path: Path) -> None:
    data = federation()
    main = Evaluation(data, ["accuracy"])
    extra = Evaluation(data, ["loss"], per_client=False, prefix="training_")
    for evaluate in (main, Evaluations(extra, main)):
        out = tmp_path / type(evaluate).__name__
        result = train(
            nn.Linear(3, 3),
            data,
            loss=losses.cross_entropy,
            rounds=2,
            evaluate=evaluate,
            evaluate_every=5,
            out=out,
        )
        assert result.clients is not None
        assert result.clients.rows == main.client_table(result.model).rows
        assert (out / "clients.csv").read_text().count("\n") == 4


def test_a_run_without_metrics_per_client_returns_none(tmp_path: Path) -> None:
    data = federation()
    whole = Evaluation(data, ["accuracy"], per_client=False)
    evaluations: list[Evaluate | None] = [None, whole, lambda model: {}]
    for evaluate in evaluations:
        result = train(
            nn.Linear(3, 3), data, loss=losses.cross_entropy, rounds=1, evaluate=evaluate
        )
        assert result.clients is None
