"""The evaluation of a model on a federation, in large batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError
from fedshuffle.evaluation import metrics as named
from fedshuffle.evaluation.clients import ClientTable
from fedshuffle.evaluation.metrics import Metric, shape, worst
from fedshuffle.evaluation.set_metrics import (
    Collected,
    SetMetric,
    compute,
    flat,
    why_undefined,
)
from fedshuffle.federation import Federation
from fedshuffle.losses import IGNORED, counted, predict, tells_counts


@final
@dataclass(frozen=True)
class _Measured:
    """What a metric came to."""

    whole: float
    clients: FloatArray
    """NaN where it is undefined, or the model has diverged."""
    undefined: dict[int, str] = default(default_factory=dict)
    """The clients for which it is undefined, and why."""


@final
class Evaluation:
    """Metrics of a model on a federation, batch by batch, so that the data may exceed memory.

    Call it with a model, or give it to :func:`fedshuffle.train`. For every metric there are three
    numbers: ``<name>`` over the whole, ``<name>_mean``, the plain mean over clients, and
    ``<name>_worst_decile``, the mean over the worst tenth of them (rounded up). A metric of sets,
    as AUC, may be undefined for a client; ``<name>_undefined`` is then the number of such clients,
    which the last two leave out. :meth:`per_client` shows every client.

    Args:
        data: who is evaluated, such as a federation of held-out examples.
        metrics: ``"loss"``, ``"accuracy"``, ``"top-5"`` (or another number), ``"perplexity"``,
            ``"auc"``, ``"f1"``, ``"f1-macro"``; a :class:`Metric` or
            :class:`~fedshuffle.evaluation.SetMetric` of your own; or one of torchmetrics.
        loss: that of the metric ``"loss"``; ``train`` gives its own where there is none.
        per_client: whether to give the numbers over clients as well.
        batch_size: examples at once.
        prefix: put before every name, such as ``"test_"``.

    >>> scores = [[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [2.0, 0.0, 1.0]]
    >>> data = Federation.from_arrays(scores, [0, 1, 2], sizes=[1, 2])
    >>> Evaluation(data, ["top-2"])(nn.Identity())
    {'top-2': 1.0, 'top-2_mean': 1.0, 'top-2_worst_decile': 1.0}
    >>> Evaluation(data, ["accuracy"])(nn.Identity())["accuracy_worst_decile"]
    0.0
    """

    def __init__(
        self,
        data: Federation,
        metrics: Sequence[Any] = ("loss", "accuracy"),
        *,
        loss: Loss | None = None,
        per_client: bool = True,
        batch_size: int = 1024,
        prefix: str = "",
    ) -> None:
        expect(data, Federation, "data")
        expect(prefix, str, "prefix")
        if not data.fields:
            raise FedShuffleError(
                "the federation to evaluate on has sizes only, and no examples."
                " Use Federation.from_arrays or Federation.from_datasets."
            )
        if isinstance(metrics, str) or not isinstance(metrics, Sequence) or not metrics:
            raise FedShuffleError(f"metrics is {metrics!r:.60}. Write a list, as ['accuracy'].")
        if loss is not None and not callable(loss):
            raise FedShuffleError(f"the loss is {loss!r:.60}, but must be a function.")
        self.data = data
        self.loss = loss
        self.over_clients = per_client
        self.batch_size = count(batch_size, "batch_size")
        self.prefix = prefix
        self._given = tuple(metrics)
        self.metrics = tuple(named.get(metric, loss) for metric in metrics)
        seen: set[str] = set()
        for metric in self.metrics:
            if metric.name in seen:
                raise FedShuffleError(
                    f"two metrics give {prefix + metric.name!r}: rename or drop one of them."
                )
            seen.add(metric.name)
        self._sets = [m for m in self.metrics if isinstance(m, SetMetric)]
        self._distinct: list[Metric] = []
        for metric in self.metrics:
            if isinstance(metric, SetMetric) or metric.each is loss:
                continue
            if self._place(metric) is None:
                self._distinct.append(metric)

    @property
    def names(self) -> list[str]:
        """The names of all numbers it gives."""
        return list(self.higher_is_better)

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """Which end is the good one, for all numbers it gives."""
        good = {}
        for metric in self.metrics:
            name = f"{self.prefix}{metric.name}"
            good[name] = metric.higher_is_better
            if self.over_clients:
                good[f"{name}_mean"] = good[f"{name}_worst_decile"] = metric.higher_is_better
                if isinstance(metric, SetMetric):
                    good[f"{name}_undefined"] = False
        return good

    def with_loss(self, loss: Loss) -> Evaluation:
        """The same, with this loss where it has none."""
        if self.loss is not None:
            return self
        return Evaluation(
            self.data,
            self._given,
            loss=loss,
            per_client=self.over_clients,
            batch_size=self.batch_size,
            prefix=self.prefix,
        )

    def check(self, model: nn.Module) -> None:
        """Try everything on the first two examples: what fails, fails before any training."""
        with evaluating(model):
            batch = self._batch(model, 0, min(2, int(self.data.offsets[-1])))
            if self._opaque is not None:
                _one_number(self._opaque(model, *batch))
            if self._by_output:
                outputs, targets = predict(model, batch)
                self._columns(outputs, targets)
            if self._sets:
                self._check_sets(outputs, targets)

    def _check_sets(self, outputs: Tensor, targets: Tensor) -> None:
        """Try metrics of sets on a few outputs, and refuse those that the targets make undefined
        for the whole, or for every client.
        """
        examples, classes, _ = flat(outputs, targets)
        field, offsets = self.data.fields[-1], self.data.offsets.tolist()
        every = field if isinstance(field, Tensor) else torch.from_numpy(np.array(field))
        parts = [every[a:b].cpu() for a, b in itertools.pairwise(offsets)]
        if classes.ndim < targets.ndim:
            parts = [part[part != IGNORED] for part in parts]
        for metric in self._sets:
            if len(classes) and not why_undefined(metric, classes):
                metric.compute(examples, classes, np.ones(len(classes)))
            if why := why_undefined(metric, torch.cat(parts)):
                raise FedShuffleError(f"metric {metric.name!r} is undefined on this data: {why}.")
            reasons = [why_undefined(metric, part) for part in parts if self.over_clients]
            if reasons and all(reasons):
                raise FedShuffleError(
                    f"metric {metric.name!r} is undefined for every client: {reasons[0]}. Measure"
                    " it over the whole only: set per_client to false."
                )

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The metrics of a model, which is left in the mode it was in."""
        return self._numbers(self._measure(model, self.over_clients))

    def per_client(self, model: nn.Module) -> ClientTable:
        """Every metric for every client, with the clients' names.

        >>> scores = [[2.0, 1.0], [0.0, 1.0], [2.0, 0.0]]
        >>> data = Federation.from_arrays(scores, [0, 1, 1], client_ids=["ann", "ann", "bob"])
        >>> Evaluation(data, ["accuracy"]).per_client(nn.Identity())
        client  examples  accuracy
        ann            2         1
        bob            1         0
        """
        return self._table(self._measure(model, True))

    def both(self, model: nn.Module) -> tuple[dict[str, float], ClientTable | None]:
        """The metrics of a model, and the table of clients if they are measured; in one pass."""
        found = self._measure(model, self.over_clients)
        return self._numbers(found), self._table(found) if self.over_clients else None

    def _numbers(self, found: Sequence[_Measured]) -> dict[str, float]:
        numbers: list[float] = []
        with np.errstate(all="ignore"):
            for metric, measured in zip(self.metrics, found, strict=True):
                numbers.append(measured.whole)
                if self.over_clients:
                    kept = np.delete(measured.clients, list(measured.undefined))
                    bad = worst(kept, metric.higher_is_better)
                    numbers += [float(part.mean()) if len(part) else np.nan for part in (kept, bad)]
                    if isinstance(metric, SetMetric):
                        numbers.append(len(measured.undefined))
        return dict(zip(self.names, numbers, strict=True))

    def _table(self, found: Sequence[_Measured]) -> ClientTable:
        names = [f"{self.prefix}{metric.name}" for metric in self.metrics]
        return ClientTable(
            self.data.ids,
            self.data.sizes,
            {name: measured.clients for name, measured in zip(names, found)},
            {name: metric.higher_is_better for name, metric in zip(names, self.metrics)},
            {
                name: measured.undefined
                for name, measured in zip(names, found)
                if measured.undefined
            },
        )

    def _measure(self, model: nn.Module, over_clients: bool) -> list[_Measured]:
        """What each metric came to; for every client only where that is asked for."""
        with evaluating(model), np.errstate(all="ignore"):  # a model may have diverged
            by_outputs, collected = self._by_outputs(model)
            by_loss = self._by_loss(model, over_clients)
            found = []
            for metric in self.metrics:
                if isinstance(metric, SetMetric):
                    found.append(self._over_sets(metric, collected, over_clients))
                    continue
                place = self._place(metric)
                weights, means = (
                    by_loss if place is None else (self.data.weights, by_outputs[place])
                )
                whole = metric.finished((weights @ means)[None]).tolist()[0]
                found.append(_Measured(whole, metric.finished(means)))
        return found

    def _over_sets(self, metric: SetMetric, collected: Collected, over_clients: bool) -> _Measured:
        outputs, targets, offsets = collected.outputs, collected.targets, collected.offsets
        numbers = np.diff(offsets)
        weights = np.repeat(self.data.weights / numbers, numbers)
        clients, undefined = np.full(len(numbers), np.nan), {}
        for k, number in enumerate(numbers.tolist() if over_clients else ()):
            own = slice(int(offsets[k]), int(offsets[k + 1]))
            clients[k], why = compute(metric, outputs[own], targets[own], np.ones(number))
            if why:
                undefined[k] = why
        return _Measured(compute(metric, outputs, targets, weights)[0], clients, undefined)

    def _place(self, metric: Metric) -> int | None:
        """Where the means of a metric stand; several metrics may be made of the same."""
        return next((k for k, m in enumerate(self._distinct) if m.each == metric.each), None)

    @property
    def _opaque(self) -> Loss | None:
        """The loss, where it is asked for and gives no values per example."""
        return (
            self.loss
            if any(isinstance(m, Metric) and m.each is self.loss for m in self.metrics)
            else None
        )

    def _by_outputs(self, model: nn.Module) -> tuple[list[FloatArray], Collected]:
        """Client means of all that follows from the outputs, and the outputs themselves if a
        metric of sets needs them; the model runs once per batch.
        """
        offsets = self.data.offsets
        sums = np.zeros((len(self._distinct), 2, len(self.data)))
        parts: list[tuple[Tensor, Tensor, IntArray]] = []
        for begin in range(0, int(offsets[-1]), self.batch_size) if self._by_output else ():
            batch = self._batch(model, begin, min(begin + self.batch_size, int(offsets[-1])))
            outputs, targets = predict(model, batch)
            own, found = segment_sums(self._columns(outputs, targets), offsets, begin)
            sums[..., own] += found
            if self._sets:
                parts.append(flat(outputs, targets))
        collected = Collected.of(parts, offsets)
        for k, client in np.argwhere(sums[:, 1] == 0).tolist():
            raise self._nothing_counts(client, self._distinct[k].name)
        for client in np.flatnonzero(np.diff(collected.offsets) == 0).tolist():
            raise self._nothing_counts(client, self._sets[0].name)
        return list(sums[:, 0] / sums[:, 1]), collected

    @property
    def _by_output(self) -> bool:
        """Whether any metric follows from the model's outputs."""
        return bool(self._distinct or self._sets)

    def _columns(self, outputs: Tensor, targets: Tensor) -> FloatArray:
        """For each distinct metric and example: the sum of its values, and how many they are."""
        found = [_columns(metric, outputs, targets) for metric in self._distinct]
        return np.stack(found) if found else np.zeros((0, 2, len(targets)))

    def _by_loss(self, model: nn.Module, over_clients: bool) -> tuple[FloatArray, FloatArray]:
        """Weights, and means of a loss that knows only the mean over a batch.

        No batch then holds examples of two clients, unless only the mean over all is asked for
        and is a mean over examples.
        """
        offsets, weights = self.data.offsets, self.data.weights
        means = np.zeros_like(weights)
        if self._opaque is None:
            return weights, means
        by_size = np.allclose(weights, self.data.sizes / offsets[-1], rtol=1e-12, atol=0)
        if by_size and not over_clients and not tells_counts(self._opaque):
            offsets, weights, means = offsets[[0, -1]], np.ones(1), np.zeros(1)
        counts = np.zeros_like(means)
        for k, size in enumerate(np.diff(offsets).tolist()):
            first = int(offsets[k])
            for begin in range(first, first + size, self.batch_size):
                end = min(begin + self.batch_size, first + size)
                batch = self._batch(model, begin, end)
                times = counted(self._opaque, model, batch)
                if times:
                    means[k] += times * _one_number(self._opaque(model, *batch))
                    counts[k] += times
        for client in np.flatnonzero(counts == 0).tolist():
            raise self._nothing_counts(client, "loss")
        return weights, means / counts

    def _nothing_counts(self, client: int, metric: str) -> FedShuffleError:
        return FedShuffleError(
            f"client {self.data.ids[client]!r} has no target that counts for metric {metric!r}."
            " Leave it out of the evaluation."
        )

    def _batch(self, model: nn.Module, begin: int, end: int) -> list[Tensor]:
        """Examples on the model's device, and floating-point ones in its precision.

        They are copies, as a model may change what it is given.
        """
        like = next((p for p in model.parameters() if p.is_floating_point()), None)
        batch = []
        for field in self.data.fields:
            part = field[begin:end]  # what lies on disk is read now
            rows = part.clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
            if like is not None:
                rows = rows.to(like.device, like.dtype if rows.is_floating_point() else None)
            batch.append(rows)
        return batch


@final
class Evaluations:
    """Several evaluations as one, such as of held-out data and of a part of the training data.

    Their names must differ: give all but one of them a ``prefix``.
    """

    def __init__(self, *parts: Evaluation) -> None:
        self.parts = parts
        twice = [name for k, name in enumerate(self.names) if name in self.names[:k]]
        if twice:
            raise FedShuffleError(f"two evaluations give {twice[0]!r}: give one a prefix.")
        self.over_clients = any(part.over_clients for part in parts)

    @property
    def names(self) -> list[str]:
        """The names of all numbers they give."""
        return [name for part in self.parts for name in part.names]

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """Which end is the good one, for all numbers they give."""
        return {name: high for part in self.parts for name, high in part.higher_is_better.items()}

    def with_loss(self, loss: Loss) -> Evaluations:
        """The same, with this loss where there is none."""
        return Evaluations(*(part.with_loss(loss) for part in self.parts))

    def check(self, model: nn.Module) -> None:
        """Try everything on a few examples."""
        for part in self.parts:
            part.check(model)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """All metrics of a model."""
        return {name: value for part in self.parts for name, value in part(model).items()}

    def per_client(self, model: nn.Module) -> ClientTable:
        """Every client of the first of these evaluations; the others may have other clients."""
        return self.parts[0].per_client(model)

    def both(self, model: nn.Module) -> tuple[dict[str, float], ClientTable | None]:
        """All metrics of a model, and the table of clients of the first that measures them."""
        found = [part.both(model) for part in self.parts]
        numbers = {name: value for part, _ in found for name, value in part.items()}
        return numbers, next((table for _, table in found if table is not None), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; after it every layer is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def segment_sums(values: FloatArray, offsets: IntArray, begin: int) -> tuple[slice, FloatArray]:
    """The clients that own columns of a batch, and the sums over the columns of each.

    The batch holds the rows from ``begin`` on of a layout where client i owns the rows
    ``offsets[i]:offsets[i + 1]``.

        >>> segment_sums(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 2, 3, 9]), begin=1)
        (slice(0, 3, None), array([ 1.,  2., 12.]))
    """
    first = int(np.searchsorted(offsets, begin, side="right")) - 1
    last = int(np.searchsorted(offsets, begin + values.shape[-1]))
    starts = np.maximum(offsets[first:last] - begin, 0)
    return slice(first, last), np.add.reduceat(values, starts, axis=-1)


def _columns(metric: Metric, outputs: Tensor, targets: Tensor) -> FloatArray:
    """Per example the sum of its values, and how many they are."""
    found, examples = metric.each(outputs, targets), len(targets)
    values, counts = found if isinstance(found, tuple) else (found, None)
    if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != examples:
        raise FedShuffleError(
            f"metric {metric.name!r} gave {shape(values)} for {examples} examples: return one value"
            " for each of them, not their mean."
        )
    table = values.cpu().double().reshape(examples, -1)
    times = torch.ones_like(table) if counts is None else counts.cpu().double().reshape(table.shape)
    sums = (table * times).where(times != 0, 0.0).sum(1)
    return torch.stack([sums, times.sum(1)]).numpy()


def _one_number(loss: Any) -> float:
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise FedShuffleError(
            f"the loss gave {shape(loss)}, but it must be one number: return the mean over the"
            " minibatch."
        )
    return float(loss)
