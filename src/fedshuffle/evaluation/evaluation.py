"""The evaluation of a model on a federation, in large batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle._arrays import IGNORED, FloatArray, IntArray, count, expect
from fedshuffle.engines import Loss
from fedshuffle.errors import FedShuffleError
from fedshuffle.evaluation import metrics as named
from fedshuffle.evaluation.clients import ClientTable
from fedshuffle.evaluation.metrics import Metric, shape, worst
from fedshuffle.evaluation.set_metrics import SetMetric, flatten
from fedshuffle.federation import Federation
from fedshuffle.losses import counted, predict, tells_counts


class _Values(NamedTuple):
    """The values of one metric; for clients NaN where it is undefined, or the model diverged."""

    overall: float
    clients: FloatArray
    undefined: dict[int, str]
    """The clients for which the metric is undefined, and why."""


@dataclass(eq=False, repr=False)
class Evaluation:
    """Metrics of a model on a federation, batch by batch, so that the data may exceed memory.

    Call it with a model, or give it to :func:`fedshuffle.train`. Every metric gives three numbers:
    ``<name>`` over all examples, ``<name>_mean``, the plain mean over clients, and
    ``<name>_worst_decile``, the mean over the worst tenth of the clients (rounded up). A metric
    such as AUC may be undefined for a client; ``<name>_undefined`` is then the number of such
    clients, which the last two leave out. :meth:`client_table` gives the values of every client.

    Args:
        data: the federation to evaluate on, such as one of held-out examples.
        metrics: ``"loss"``, ``"accuracy"``, ``"top-5"`` (or another number), ``"perplexity"``,
            ``"auc"``, ``"f1"``, ``"f1-macro"``; a :class:`Metric` or
            :class:`~fedshuffle.evaluation.SetMetric`; or a metric of torchmetrics.
        loss: the loss of the metric ``"loss"``; by default the loss of ``train``.
        per_client: whether to give the mean and the worst decile over clients as well.
        batch_size: the number of examples per batch.
        prefix: put before every name, such as ``"test_"``.

    >>> scores = [[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [2.0, 0.0, 1.0]]
    >>> data = Federation.from_arrays(scores, [0, 1, 2], sizes=[1, 2])
    >>> Evaluation(data, ["top-2"])(nn.Identity())
    {'top-2': 1.0, 'top-2_mean': 1.0, 'top-2_worst_decile': 1.0}
    >>> Evaluation(data, ["accuracy"])(nn.Identity())["accuracy_worst_decile"]
    0.0
    """

    data: Federation
    metrics: Sequence[Any] = ("loss", "accuracy")
    _: KW_ONLY
    loss: Loss | None = None
    per_client: bool = True
    batch_size: int = 1024
    prefix: str = ""

    def __post_init__(self) -> None:
        expect(self.data, Federation, "data")
        expect(self.prefix, str, "prefix")
        count(self.batch_size, "batch_size")
        if not self.data.fields:
            raise FedShuffleError(
                "the federation to evaluate on has sizes only, and no examples."
                " Use Federation.from_arrays or Federation.from_datasets."
            )
        if isinstance(self.metrics, str) or not self.metrics:
            raise FedShuffleError(
                f"metrics is {self.metrics!r:.60}. Write a list, as ['accuracy']."
            )
        expect(self.metrics, Sequence, "metrics")
        if self.loss is not None and not callable(self.loss):
            raise FedShuffleError(f"the loss is {self.loss!r:.60}, but must be a function.")
        self._metrics = [named.get(metric, self.loss) for metric in self.metrics]
        names = [name for metric in self._metrics for name in self._names(metric)]
        _refuse_duplicates(names, "metrics", "rename or drop one")
        self._sets = [m for m in self._metrics if isinstance(m, SetMetric)]
        means = [m for m in self._metrics if isinstance(m, Metric)]
        self._means = [m for m in means if m.each is not self.loss]
        # A loss without values per example is evaluated by itself, if it is asked for.
        self._opaque_loss = self.loss if len(self._means) < len(means) else None

    def _names(self, metric: Metric | SetMetric) -> list[str]:
        """The names of the numbers of one metric, in the order of :meth:`_numbers`."""
        over_clients = ["_mean", "_worst_decile"] + ["_undefined"] * isinstance(metric, SetMetric)
        suffixes = ["", *over_clients] if self.per_client else [""]
        return [f"{self.prefix}{metric.name}{suffix}" for suffix in suffixes]

    @property
    def names(self) -> list[str]:
        """The names of all numbers it gives."""
        return list(self.higher_is_better)

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """For every number it gives, whether higher is better."""
        return {
            name: metric.higher_is_better and k < 3  # the fourth is the number of undefined ones
            for metric in self._metrics
            for k, name in enumerate(self._names(metric))
        }

    def with_loss(self, loss: Loss) -> Evaluation:
        """The same evaluation, with this loss where it has none."""
        return replace(self, loss=loss) if self.loss is None else self

    def check(self, model: nn.Module) -> None:
        """Try everything on two examples, so that a mistake shows before any training."""
        with evaluation_mode(model):
            batch = self._batch(model, 0, min(2, int(self.data.offsets[-1])))
            if self._opaque_loss is not None:
                _one_number(self._opaque_loss(model, *batch))
            if self._means or self._sets:
                outputs, targets = predict(model, batch)
                self._sums(outputs, targets)
            if self._sets:
                self._check_sets(outputs, targets)

    def _check_sets(self, outputs: Tensor, targets: Tensor) -> None:
        """Try set metrics on a few outputs; refuse one that no data or no client defines."""
        examples, classes, _ = flatten(outputs, targets)
        field = self.data.fields[-1]
        every = field if isinstance(field, Tensor) else torch.from_numpy(np.array(field))
        parts = [every[a:b].cpu() for a, b in itertools.pairwise(self.data.offsets.tolist())]
        if classes.ndim < targets.ndim:
            parts = [part[part != IGNORED] for part in parts]
        for metric in self._sets:
            if len(classes) and not metric.why_undefined(classes):
                metric.compute(examples, classes, np.ones(len(classes)))
            if why := metric.why_undefined(torch.cat(parts)):
                raise FedShuffleError(f"metric {metric.name!r} is undefined on this data: {why}.")
            reasons = [metric.why_undefined(part) for part in parts if self.per_client]
            if reasons and all(reasons):
                raise FedShuffleError(
                    f"metric {metric.name!r} is undefined for every client: {reasons[0]}. Measure"
                    " it over all examples only: set per_client to false."
                )

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """The metrics of a model, which is left in the mode it was in."""
        return self.evaluate(model)[0]

    def client_table(self, model: nn.Module) -> ClientTable:
        """Every metric for every client, with the clients' names.

        >>> scores = [[2.0, 1.0], [0.0, 1.0], [2.0, 0.0]]
        >>> data = Federation.from_arrays(scores, [0, 1, 1], client_ids=["ann", "ann", "bob"])
        >>> Evaluation(data, ["accuracy"]).client_table(nn.Identity())
        client  examples  accuracy
        ann            2         1
        bob            1         0
        """
        return self._table(self._measure(model, True))

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], ClientTable | None]:
        """The metrics of a model, and the table of clients if they are measured, in one pass."""
        values = self._measure(model, self.per_client)
        return self._numbers(values), self._table(values) if self.per_client else None

    def _numbers(self, values: Sequence[_Values]) -> dict[str, float]:
        numbers: dict[str, float] = {}
        with np.errstate(all="ignore"):
            for metric, (overall, clients, undefined) in zip(self._metrics, values, strict=True):
                defined = np.delete(clients, list(undefined))
                parts = [defined, worst(defined, metric.higher_is_better)]
                means = [float(part.mean()) if len(part) else np.nan for part in parts]
                numbers |= zip(self._names(metric), [overall, *means, len(undefined)], strict=False)
        return numbers

    def _table(self, values: Sequence[_Values]) -> ClientTable:
        names = [f"{self.prefix}{metric.name}" for metric in self._metrics]
        return ClientTable(
            self.data.ids,
            self.data.sizes,
            {name: v.clients for name, v in zip(names, values, strict=True)},
            {name: m.higher_is_better for name, m in zip(names, self._metrics, strict=True)},
            {name: v.undefined for name, v in zip(names, values, strict=True) if v.undefined},
        )

    def _measure(self, model: nn.Module, over_clients: bool) -> list[_Values]:
        """The values of each metric; of set metrics per client only if that is asked for."""
        with evaluation_mode(model), np.errstate(all="ignore"):  # the model may have diverged
            client_means, outputs, targets, offsets = self._by_outputs(model)
            by_loss, by_outputs = self._by_loss(model, over_clients), iter(client_means)
            values = []
            for metric in self._metrics:
                if isinstance(metric, SetMetric):
                    values.append(self._over_sets(metric, outputs, targets, offsets, over_clients))
                    continue
                opaque = metric.each is self.loss
                weights, means = by_loss if opaque else (self.data.weights, next(by_outputs))
                overall = metric.finished((weights @ means)[None]).tolist()[0]
                values.append(_Values(overall, metric.finished(means), {}))
        return values

    def _over_sets(
        self, metric: SetMetric, outputs: Tensor, targets: Tensor, offsets: IntArray, each: bool
    ) -> _Values:
        sizes = np.diff(offsets)
        weights = np.repeat(self.data.weights / sizes, sizes)
        clients, undefined = np.full(len(sizes), np.nan), {}
        for k, size in enumerate(sizes.tolist() if each else ()):
            own = slice(int(offsets[k]), int(offsets[k + 1]))
            clients[k], why = metric.evaluate(outputs[own], targets[own], np.ones(size))
            if why:
                undefined[k] = why
        return _Values(metric.evaluate(outputs, targets, weights)[0], clients, undefined)

    def _by_outputs(self, model: nn.Module) -> tuple[FloatArray, Tensor, Tensor, IntArray]:
        """Client means of the metrics; and, if set metrics need them, outputs, targets and where
        those of each client begin. The model runs once per batch.
        """
        offsets = self.data.offsets
        sums = np.zeros((len(self._means), 2, len(self.data)))
        parts: list[tuple[Tensor, Tensor, IntArray]] = []
        for begin in range(0, int(offsets[-1]), self.batch_size) if len(sums) or self._sets else ():
            batch = self._batch(model, begin, min(begin + self.batch_size, int(offsets[-1])))
            outputs, targets = predict(model, batch)
            own, found = segment_sums(self._sums(outputs, targets), offsets, begin)
            sums[..., own] += found
            if self._sets:
                parts.append(flatten(outputs, targets))
        for k, client in np.argwhere(sums[:, 1] == 0).tolist():
            raise self._nothing_counts(client, self._means[k].name)
        means = sums[:, 0] / sums[:, 1]
        if not parts:
            return means, torch.empty(0), torch.empty(0), offsets
        all_outputs, all_targets, counts = zip(*parts, strict=True)
        offsets = np.concatenate([[0], *counts]).cumsum()[offsets]
        for client in np.flatnonzero(np.diff(offsets) == 0).tolist():
            raise self._nothing_counts(client, self._sets[0].name)
        return means, torch.cat(all_outputs), torch.cat(all_targets), offsets

    def _sums(self, outputs: Tensor, targets: Tensor) -> FloatArray:
        """For each metric and example: the sum of its values, and their number."""
        sums = [_example_sums(metric, outputs, targets) for metric in self._means]
        return np.stack(sums) if sums else np.zeros((0, 2, len(targets)))

    def _by_loss(self, model: nn.Module, over_clients: bool) -> tuple[FloatArray, FloatArray]:
        """Weights, and means of a loss that gives only the mean over a batch.

        No batch then holds examples of two clients, unless only the mean over all examples is
        asked for and all examples have the same weight.
        """
        offsets, weights = self.data.offsets, self.data.weights
        means = np.zeros_like(weights)
        if self._opaque_loss is None:
            return weights, means
        by_size = np.allclose(weights, self.data.sizes / offsets[-1], rtol=1e-12, atol=0)
        if by_size and not over_clients and not tells_counts(self._opaque_loss):
            offsets, weights, means = offsets[[0, -1]], np.ones(1), np.zeros(1)
        counts = np.zeros_like(means)
        for k, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
            for begin in range(first, last, self.batch_size):
                batch = self._batch(model, begin, min(begin + self.batch_size, last))
                if times := counted(self._opaque_loss, model, batch):
                    means[k] += times * _one_number(self._opaque_loss(model, *batch))
                    counts[k] += times
        for client in np.flatnonzero(counts == 0).tolist():
            raise self._nothing_counts(client, "loss")
        return weights, means / counts

    def _nothing_counts(self, client: int, metric: str) -> FedShuffleError:
        return FedShuffleError(
            f"client {self.data.ids[client]!r} has no target that counts for metric {metric!r}."
            " Leave that client out of the evaluation."
        )

    def _batch(self, model: nn.Module, begin: int, end: int) -> list[Tensor]:
        """Copies of examples on the model's device, floating-point ones in its precision."""
        like = next((p for p in model.parameters() if p.is_floating_point()), None)
        batch = []
        for field in self.data.fields:
            part = field[begin:end]  # read from disk here, if the field is memory-mapped
            rows = part.clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
            if like is not None:
                rows = rows.to(like.device, like.dtype if rows.is_floating_point() else None)
            batch.append(rows)
        return batch


class Evaluations:
    """Several evaluations as one, such as of held-out data and of a part of the training data.

    Their names must differ: give all but one of them a ``prefix``.

    >>> data = Federation.from_arrays([[2.0, 1.0]], [0], sizes=[1])
    >>> parts = [Evaluation(data, ["accuracy"], prefix=p, per_client=False) for p in ("", "test_")]
    >>> Evaluations(*parts)(nn.Identity())
    {'accuracy': 1.0, 'test_accuracy': 1.0}
    """

    def __init__(self, *parts: Evaluation) -> None:
        self.parts = parts
        _refuse_duplicates(
            [name for part in parts for name in part.names], "evaluations", "give one a prefix"
        )
        self.per_client = any(part.per_client for part in parts)

    @property
    def names(self) -> list[str]:
        """The names of all numbers they give."""
        return list(self.higher_is_better)

    @property
    def higher_is_better(self) -> dict[str, bool]:
        """For every number they give, whether higher is better."""
        return {name: high for part in self.parts for name, high in part.higher_is_better.items()}

    def with_loss(self, loss: Loss) -> Evaluations:
        """The same evaluations, with this loss where they have none."""
        return Evaluations(*(part.with_loss(loss) for part in self.parts))

    def check(self, model: nn.Module) -> None:
        """Try everything on a few examples."""
        for part in self.parts:
            part.check(model)

    def __call__(self, model: nn.Module) -> dict[str, float]:
        """All metrics of a model."""
        return self.evaluate(model)[0]

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], ClientTable | None]:
        """All metrics of a model, and the table of the first evaluation that measures clients."""
        parts = [part.evaluate(model) for part in self.parts]
        numbers = {name: value for values, _ in parts for name, value in values.items()}
        return numbers, next((table for _, table in parts if table is not None), None)


def _refuse_duplicates(names: Sequence[str], what: str, remedy: str) -> None:
    for k, name in enumerate(names):
        if name in names[:k]:
            raise FedShuffleError(f"two {what} give {name!r}: {remedy}.")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every layer is in its own mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def segment_sums(values: FloatArray, offsets: IntArray, begin: int) -> tuple[slice, FloatArray]:
    """The clients with examples in a batch, and the sums over the examples of each.

    The batch starts with example ``begin``; client i has ``offsets[i]:offsets[i + 1]``.

        >>> segment_sums(np.array([1.0, 2.0, 4.0, 8.0]), np.array([0, 2, 3, 9]), begin=1)
        (slice(0, 3, None), array([ 1.,  2., 12.]))
    """
    first = int(np.searchsorted(offsets, begin, side="right")) - 1
    last = int(np.searchsorted(offsets, begin + values.shape[-1]))
    starts = np.maximum(offsets[first:last] - begin, 0)
    return slice(first, last), np.add.reduceat(values, starts, axis=-1)


def _example_sums(metric: Metric, outputs: Tensor, targets: Tensor) -> FloatArray:
    """Per example the sum of its values, and their number."""
    result, examples = metric.each(outputs, targets), len(targets)
    values, counts = result if isinstance(result, tuple) else (result, None)
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
