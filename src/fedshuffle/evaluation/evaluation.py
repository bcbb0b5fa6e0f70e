"""The evaluation of a model on a federation, in large batches."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedshuffle._arrays import FloatArray, IntArray, count, expect
from fedshuffle.engines import Loss
from fedshuffle.engines.example_transform import transformed
from fedshuffle.errors import FedShuffleError
from fedshuffle.evaluation import metrics as named
from fedshuffle.evaluation.clients import ClientTable
from fedshuffle.evaluation.metrics import Metric, SetMetric, flatten, shape
from fedshuffle.federation import Federation
from fedshuffle.losses import MeanLoss, counted, predict, tells_counts, which_count
from fedshuffle.randomness import Address


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
        if not isinstance(self.metrics, list | tuple) or not self.metrics:
            raise FedShuffleError(
                f"metrics is {self.metrics!r:.60}. Write a list, as ['accuracy']."
            )
        if self.loss is not None and not callable(self.loss):
            raise FedShuffleError(f"the loss is {self.loss!r:.60}, but must be a function.")
        self._metrics = [named.get(metric, self.loss) for metric in self.metrics]
        self._predict = self.loss.predict if isinstance(self.loss, MeanLoss) else predict
        self._sets = [m for m in self._metrics if isinstance(m, SetMetric)]
        # A loss without values per example is evaluated by itself, in batches of its own.
        means = [m for m in self._metrics if isinstance(m, Metric)]
        self._opaque = [m for m in means if m.each is self.loss]
        self._means = [m for m in means if m.each is not self.loss]
        self.higher_is_better: dict[str, bool] = {}
        """For every number it gives, whether higher is better."""
        for metric in self._metrics:
            for name in self._names(metric):
                high = metric.higher_is_better and not name.endswith("_undefined")
                _add_name(self.higher_is_better, name, high, "metrics", "rename or drop one")

    def _names(self, metric: Metric | SetMetric) -> list[str]:
        """The names of the numbers of one metric, over all examples and over clients."""
        over_clients = ["_mean", "_worst_decile"] + ["_undefined"] * isinstance(metric, SetMetric)
        suffixes = ["", *over_clients] if self.per_client else [""]
        return [f"{self.prefix}{metric.name}{suffix}" for suffix in suffixes]

    @property
    def names(self) -> list[str]:
        """The names of all numbers it gives."""
        return list(self.higher_is_better)

    def with_loss(self, loss: Loss) -> "Evaluation":
        """The same evaluation, with this loss where it has none."""
        return replace(self, loss=loss) if self.loss is None else self

    def check(self, model: nn.Module) -> None:
        """Try everything on two examples, so that a mistake shows before any training."""
        with evaluation_mode(model):
            batch = next(self._batches(model, 0, min(2, int(self.data.offsets[-1]))))
            if self._opaque:
                _mean_loss(self.loss, model, batch)
            if self._means or self._sets:
                outputs, targets = self._predict(model, batch)
                for mean in self._means:
                    mean.sums(outputs, targets)
                for metric in self._sets:
                    self._check_set(metric, outputs, targets)

    def _check_set(self, metric: SetMetric, outputs: Tensor, targets: Tensor) -> None:
        """Try a set metric on a few outputs; refuse one that no data or no client defines."""
        examples, classes, _ = flatten(outputs, targets)
        if len(classes) and not metric.undefined(classes):
            metric.compute(examples, classes, np.ones(len(classes)))
        if self.data.transform is not None:  # which may change the targets
            return
        every = self.data.tensors()[-1].cpu()
        parts = [every[a:b] for a, b in pairwise(self.data.offsets.tolist())]
        if not every.is_floating_point():
            parts = [part[which_count(part)] for part in parts]
        if why := metric.undefined(torch.cat(parts)):
            raise FedShuffleError(f"metric {metric.name!r} is undefined on this data: {why}.")
        reasons = [metric.undefined(part) for part in parts if self.per_client]
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
        return self._measure(model, True)[1]

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], ClientTable | None]:
        """The metrics of a model, and the table of clients if they are measured, in one pass."""
        numbers, table = self._measure(model, self.per_client)
        if not self.per_client:
            return numbers, None
        for metric in self._metrics:
            name, *over_clients = self._names(metric)
            numbers |= zip(over_clients, table.spread(name), strict=False)
        return {name: numbers[name] for name in self.names}, table

    def _measure(self, model: nn.Module, each_client: bool) -> tuple[dict[str, float], ClientTable]:
        """Each metric over all clients, and per client; set metrics only if that is asked for."""
        found: dict[str, _Values] = {}
        with evaluation_mode(model), np.errstate(all="ignore"):  # the model may have diverged
            for metric in self._opaque:
                found[metric.name] = self._of_loss(metric, model, each_client)
            if self._means or self._sets:
                found |= self._of_outputs(model, each_client)
        values = {self.prefix + metric.name: found[metric.name] for metric in self._metrics}
        table = ClientTable(
            self.data.ids,
            self.data.sizes,
            {name: value.clients for name, value in values.items()},
            {name: self.higher_is_better[name] for name in values},
            {name: value.undefined for name, value in values.items() if value.undefined},
        )
        return {name: value.overall for name, value in values.items()}, table

    def _of_outputs(self, model: nn.Module, each_client: bool) -> dict[str, _Values]:
        """The metrics of outputs and targets. The model runs once per batch."""
        offsets = self.data.offsets
        sums = np.zeros((len(self._means), 2, len(self.data)))
        flat = []
        begin = 0
        for batch in self._batches(model, 0, int(offsets[-1])):
            outputs, targets = self._predict(model, batch)
            first = int(np.searchsorted(offsets, begin, side="right")) - 1
            last = int(np.searchsorted(offsets, begin + len(targets)))
            starts = np.maximum(offsets[first:last] - begin, 0)  # of the clients in the batch
            for own, mean in zip(sums, self._means, strict=True):
                values = mean.sums(outputs, targets)
                own[:, first:last] += np.add.reduceat(values, starts, axis=1)
            if self._sets:
                flat.append(flatten(outputs, targets))
            begin += len(targets)
        found = {}
        for own, mean in zip(sums, self._means, strict=True):
            found[mean.name] = self._of_sums(mean, own[0], own[1], self.data.weights)
        if flat:
            all_outputs, all_targets, tokens = zip(*flat, strict=True)
            sizes = np.add.reduceat(np.concatenate(tokens), offsets[:-1])
            examples = torch.cat(all_outputs), torch.cat(all_targets)
            for metric in self._sets:
                found[metric.name] = self._of_set(metric, *examples, sizes, each_client)
        return found

    def _of_set(
        self, metric: SetMetric, x: Tensor, y: Tensor, sizes: IntArray, each_client: bool
    ) -> _Values:
        """A set metric of outputs x and targets y, given the number of outputs of each client."""
        self._check_counts(sizes, metric.name)
        weights = np.repeat(self.data.weights / sizes, sizes)
        clients, undefined = np.full(len(sizes), np.nan), {}
        ends = np.cumsum(sizes).tolist()
        for k, (size, end) in enumerate(zip(sizes.tolist(), ends) if each_client else ()):
            own = slice(end - size, end)
            clients[k], why = metric.evaluate(x[own], y[own], np.ones(size))
            if why:
                undefined[k] = why
        return _Values(metric.evaluate(x, y, weights)[0], clients, undefined)

    def _of_loss(self, metric: Metric, model: nn.Module, each_client: bool) -> _Values:
        """A loss that gives only the mean over a batch.

        No batch then holds examples of two clients, unless only the mean over all examples is
        asked for and all examples have the same weight.
        """
        offsets, weights = self.data.offsets, self.data.weights
        by_size = np.allclose(weights, self.data.sizes / offsets[-1], rtol=1e-12, atol=0)
        if by_size and not each_client and not tells_counts(self.loss):
            offsets, weights = offsets[[0, -1]], np.ones(1)
        sums, counts = np.zeros((2, len(weights)))
        for k, (first, last) in enumerate(pairwise(offsets.tolist())):
            for batch in self._batches(model, first, last):
                if times := counted(self.loss, model, batch):
                    sums[k] += times * _mean_loss(self.loss, model, batch)
                    counts[k] += times
        return self._of_sums(metric, sums, counts, weights)

    def _of_sums(
        self, metric: Metric, sums: FloatArray, counts: FloatArray, weights: FloatArray
    ) -> _Values:
        self._check_counts(counts, metric.name)
        means = sums / counts
        overall = metric.finish((weights @ means)[None]).tolist()[0]
        return _Values(overall, metric.finish(means), {})

    def _check_counts(self, counts: Any, metric: str) -> None:
        for client in np.flatnonzero(counts == 0).tolist():
            raise FedShuffleError(
                f"client {self.data.ids[client]!r} has no target that counts for metric {metric!r}."
                " Leave that client out of the evaluation."
            )

    def _batches(self, model: nn.Module, first: int, last: int) -> Iterator[list[Tensor]]:
        """Copies of examples on the model's device, floating-point ones in its precision."""
        like = next((p for p in model.parameters() if p.is_floating_point()), None)

        def converted(field: Tensor) -> Tensor:
            if like is None:
                return field
            return field.to(like.device, like.dtype if field.is_floating_point() else None)

        for begin in range(first, last, self.batch_size):
            rows = slice(begin, min(begin + self.batch_size, last))
            batch = []
            for part in (field[rows] for field in self.data.fields):  # may be read from disk here
                own = part.clone() if isinstance(part, Tensor) else torch.from_numpy(np.array(part))
                batch.append(converted(own))
            if self.data.transform is not None:  # always with the same draws
                batch = list(transformed(self.data.transform, batch, Address(part=begin)))
            yield list(map(converted, batch))


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
        self.per_client = any(part.per_client for part in parts)
        self.higher_is_better: dict[str, bool] = {}
        """For every number they give, whether higher is better."""
        for part in parts:
            for name, high in part.higher_is_better.items():
                _add_name(self.higher_is_better, name, high, "evaluations", "give one a prefix")

    @property
    def names(self) -> list[str]:
        """The names of all numbers they give."""
        return list(self.higher_is_better)

    def with_loss(self, loss: Loss) -> "Evaluations":
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


def _add_name(known: dict[str, bool], name: str, high: bool, what: str, remedy: str) -> None:
    if name in known:
        raise FedShuffleError(f"two {what} give {name!r}: {remedy}.")
    known[name] = high


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every layer is in its own mode again.

    >>> model = nn.Dropout()
    >>> with evaluation_mode(model):
    ...     inside = model.training
    >>> inside, model.training
    (False, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _mean_loss(loss: Any, model: nn.Module, batch: Sequence[Tensor]) -> float:
    mean = loss(model, *batch)
    if not isinstance(mean, Tensor) or mean.ndim != 0:
        raise FedShuffleError(
            f"the loss gave {shape(mean)}, but it must be one number: return the mean over the"
            " minibatch."
        )
    return float(mean)
