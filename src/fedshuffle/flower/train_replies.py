"""What clients with a ``train`` of their own reply: checked, and summed array by array."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedshuffle._arrays import FloatArray
from fedshuffle.errors import FedShuffleError, error_context, one_line
from fedshuffle.flower.exchange import expired
from fedshuffle.flower.protocol import read_array, reason_of

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of what torch's normalisation layers observe, and do not train."""
_MOST = 2**53
"""Larger numbers of steps are refused: ``planned-steps`` could not be sent."""
_ADD = "Add it to the metrics that train returns: MetricRecord({{..., {}}})."
_NAME = ' If train does not use plain SGD, tell the strategy: optimiser="sgd:momentum=0.9".'


@dataclass(frozen=True)
class TrainReply:
    """The reply of one client."""

    node: int
    content: RecordDict
    arrays: ArrayRecord
    examples: float
    steps: float

    @classmethod
    def read(
        cls, reply: Message, sent: ArrayRecord, examples_key: str, steps_key: str, first: bool
    ) -> "TrainReply | str":
        """The reply of a client that was sent these arrays, or why it failed. If its program is
        wrong, that is an error, unless others have replied before: then work would be lost.
        """
        if reply.has_error():
            return _failure(reply)
        try:
            return cls._checked(reply, sent, examples_key, steps_key)
        except FedShuffleError as error:
            if first:
                raise
            return str(error)

    @classmethod
    def _checked(
        cls, reply: Message, sent: ArrayRecord, examples_key: str, steps_key: str
    ) -> "TrainReply | str":
        node, content = reply.metadata.src_node_id, reply.content
        arrays, metrics = [*content.array_records.values()], [*content.metric_records.values()]
        if len(arrays) != 1 or len(metrics) != 1:
            raise FedShuffleError(
                f"node {node} replied with {len(arrays)} array records and {len(metrics)} metric"
                " records: a reply to train has one of each."
            )
        remedy = _ADD.format(f'"{examples_key}": len(trainloader.dataset)')
        examples = _positive(node, metrics[0], examples_key, "number of examples", remedy)
        remedy = _ADD.format(f'"{steps_key}": epochs * len(trainloader)') + _NAME
        steps = _positive(node, metrics[0], steps_key, "number of local steps it did", remedy)
        if not 1 <= steps <= _MOST:
            raise FedShuffleError(
                f"the client at node {node} reports {steps:g} as {steps_key!r}: a number from 1 to"
                f" {_MOST:.0e} is needed."
            )
        found = cls(node, content, arrays[0], examples, steps)
        found._check_model(sent)
        for name in found.arrays:
            if not np.isfinite(_real(found.arrays, name, f"of node {node}")).all():
                return f"{name!r} of its model is not finite. Lower the step size."
        return found

    def _check_model(self, sent: ArrayRecord) -> None:
        """Refuse arrays of another model."""
        if sent.keys() != self.arrays.keys():
            differ = sorted(sent.keys() ^ self.arrays.keys())
            raise FedShuffleError(
                f"node {self.node} replied with other arrays than it was sent: {differ[0]!r} and"
                f" {len(differ) - 1} more are on one side only. Send back the whole model."
            )
        for name, array in self.arrays.items():
            if tuple(array.shape) != tuple(sent[name].shape):
                raise FedShuffleError(
                    f"node {self.node} replied with {name!r} of shape {tuple(array.shape)}, and was"
                    f" sent {tuple(sent[name].shape)}. Build the same model on both sides."
                )


def check_start(arrays: ArrayRecord) -> None:
    """Refuse a model that cannot be trained, before clients try."""
    if not arrays:
        raise FedShuffleError("initial_arrays are empty: give ArrayRecord(model.state_dict()).")
    for name in arrays:
        if not np.isfinite(_real(arrays, name, "of initial_arrays")).all():
            raise FedShuffleError(
                f"{name!r} of initial_arrays is not finite: start from another model, or if it is a"
                " mask, keep it out of the state dict (register_buffer(..., persistent=False))."
            )


def _real(arrays: ArrayRecord, name: str, whose: str) -> NDArray[Any]:
    """An array of real numbers, or a clear error."""
    cannot, remedy = f"the array {name!r} {whose} cannot be read", "Send numpy arrays of numbers"
    # Of numpy's error only the first sentence: the second advises to unpickle.
    with error_context(lambda e: f"{cannot}: {one_line(e).split('. ')[0]}. {remedy}.", Exception):
        values = read_array(arrays[name])
    if values.dtype.kind not in "biuf":
        raise FedShuffleError(
            f"the array {name!r} {whose} is of type {values.dtype}, and is averaged with others:"
            " real numbers are needed."
        )
    return values


def _failure(reply: Message) -> str:
    """Why a client sent an error."""
    why = reason_of(reply)
    if "secaggplus" in why:
        why += (
            ". Its secaggplus_mod hides the number of its steps: leave the mod out, or use"
            " FedShuffleStrategy(secure_aggregation=...)."
        )
    if expired(reply):
        why += ". Give clients more time (timeout of start)."
    return why


def _positive(node: int, metrics: MetricRecord, key: str, what: str, remedy: str) -> float:
    if key not in metrics:
        raise FedShuffleError(
            f"the client at node {node} does not report {key!r}, the {what}. {remedy}"
        )
    value = metrics[key]
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise FedShuffleError(
            f"the client at node {node} reports {value!r:.40} as {key!r}, the {what}: a positive"
            " number is needed."
        )
    return float(value)


def move(
    x: ArrayRecord,
    replied: Sequence[ArrayRecord],
    weights: FloatArray,
    per_length: FloatArray,
    starts: Sequence[ArrayRecord] | None = None,
) -> ArrayRecord:
    r"""The model :math:`x + \sum_i a_i l_i (y_i - x_i)`, array by array, for weights :math:`a_i`
    and factors :math:`l_i` that correct for the steps; everybody starts from :math:`x` unless
    ``starts`` are given.

    Integers, and what normalisation layers observe, are no sums of steps: they are averaged, with
    weights in proportion to :math:`a_i` that sum to one.

    >>> x, y = (ArrayRecord({"w": Array(np.array([v]))}) for v in (1.0, 3.0))
    >>> move(x, [y], np.array([2.0]), np.array([1.0]))["w"].numpy().tolist()
    [5.0]
    """
    shares, factors, moved = weights / weights.sum(), weights * per_length, {}
    pairs = [*zip(replied, starts or [x] * len(replied), strict=True)]
    for name, array in x.items():
        start = array.numpy()
        floating = np.issubdtype(start.dtype, np.floating)
        steps = floating and name.rpartition(".")[2] not in _STATISTICS
        total: NDArray[np.float64] = start.astype(np.float64) if steps else np.zeros(start.shape)
        for (reply, begun), weight in zip(pairs, factors if steps else shares, strict=True):
            value = reply[name].numpy().astype(np.float64)
            total += weight * (value - begun[name].numpy() if steps else value)
        moved[name] = Array(np.asarray(total if floating else total.round(), dtype=start.dtype))
    return ArrayRecord(moved)
