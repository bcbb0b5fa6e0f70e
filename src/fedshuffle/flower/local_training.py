"""The exchange of local training: what each client is told, and what its reply says."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.chain import WireChain, context_of
from fedshuffle.flower.exchange import Exchange, check_size
from fedshuffle.flower.protocol import Reply
from fedshuffle.flower.update_buffer import Update, UpdateBuffer
from fedshuffle.kernel import ClientTask, LocalTraining
from fedshuffle.local_optimisers import SGD
from fedshuffle.state import ClientRows


@dataclass(frozen=True)
class TrainingOptions:
    """What the strategy adds to a request."""

    batch_size: int
    withheld: bool = False
    """Whether clients withhold their sizes."""
    clipping_range: float | None = None
    """Of secure aggregation."""
    weights: Mapping[int, float] = field(default_factory=dict)
    """The clients' aggregation weights, which their transforms see."""
    wire: WireChain = field(default_factory=WireChain)
    """The chain of transforms; methods keep their clients' states at the server."""
    state_after: Mapping[int, int] = field(default_factory=dict)
    """After how many rounds the server last had a reply of each client."""
    states: ClientRows | None = None
    """What the server knows of the clients' states."""
    send_gradient: bool = False
    """Whether the method also needs each client's full gradient."""
    must_finish: bool = False
    """Whether all steps must be done: weights that grow with unfinished work would exceed those
    that privacy counts on."""


def local_training(request: LocalTraining, options: TrainingOptions) -> Exchange[UpdateBuffer]:
    """Local training of all clients of a request."""
    tasks = {task.minibatches.client: task for task in request.tasks}
    wire, round = options.wire, request.tasks[0].minibatches.round
    texts = wire.texts
    metrics = wire.metrics(context_of(request.tasks[0], request.shared), request.start)
    if options.clipping_range is None:  # with secure aggregation nobody would mask them
        metrics |= {"train_loss", "update_norm"}
    shared = protocol.arrays(**request.shared) if wire.chain else None
    encode = lru_cache(1)(protocol.arrays)  # once for all clients that get the same

    def write(client: int) -> RecordDict:
        task = tasks[client]
        minibatches, step = task.minibatches, task.coefficients
        fields = protocol.TrainRequest(
            client=client,
            round=round,
            seed=str(minibatches.seed),
            steps=minibatches.steps,
            batch_size=options.batch_size,
            order=minibatches.order,
            step_size=float(task.step_size),
            alpha=float(step.alpha),
            beta=float(step.beta),
            mu=float(step.mu),
            clip=float(task.clip),
            weight_decay=float(task.weight_decay),
            optimiser=str(task.optimiser or SGD),
            own_gradient=bool(step.own_gradient),
            send_gradient=options.send_gradient,
            weight=float(options.weights[client]),
            chain=texts,
            state_after=options.state_after.get(client, 0) if wire.chain.keeps_state else None,
            size=None if options.withheld else minibatches.size,
            clipping_range=options.clipping_range,
        )
        arrays = encode(x=request.start, v=step.v, scale=step.scale)
        return protocol.content(fields, arrays, **{protocol.SHARED: shared} if shared else {})

    def check(fields: Reply) -> None:
        planned = tasks[fields.client].minibatches.steps
        if not 1 <= fields.steps <= planned:
            raise FedShuffleError(f"it says that it did {fields.steps} of {planned} steps.")
        if options.must_finish and fields.steps < planned:
            raise FedShuffleError(
                f"it did {fields.steps} of {planned} steps, and privacy counts on all. Leave out"
                " seconds."
            )
        if fields.metrics.keys() != metrics:
            sent, wanted = sorted(fields.metrics), sorted(metrics)
            raise FedShuffleError(f"its metrics are {sent!r:.200} instead of {wanted}.")
        if (clipped := fields.metrics.get("clipped", 0.0)) not in (0, 1):
            raise FedShuffleError(f"it says that {clipped} of its update was clipped, not 0 or 1.")

    def read(fields: Reply, reply: Message) -> Update:
        task = tasks[fields.client]
        if wire.channel is not None:
            weight = [options.weights[fields.client]]
            return decode(fields, reply, replace(task, weights=weight))
        wanted = {"update": request.start.shape}
        if options.send_gradient:
            wanted["gradient"] = request.start.shape
        found = protocol.vectors(reply, request.start.dtype, **wanted)
        if len(found) < len(wanted):
            raise FedShuffleError("the reply lacks the full gradient.")
        values = torch.stack([check_size(found[name], name) for name in wanted])
        size = float(protocol.nbytes(reply.content))
        return Update(values, fields.steps, {**fields.metrics, "bytes_up": size})

    def decode(fields: Reply, reply: Message, task: ClientTask) -> Update:
        state: Tensor | None = None
        if wire.shares_memory:
            assert options.states is not None
            (state,) = options.states.rows(np.array([fields.client]))
        arrays, context = protocol.raw(reply, protocol.MESSAGE), context_of(task, request.shared)
        values, kept, found = wire.decode(arrays, request.start, state, context)
        rows = [check_size(values, "message")] + ([] if kept is None else [kept])
        size = float(sum(array.nbytes for array in arrays.values()))
        after = {name: float(numbers[0]) for name, numbers in found.items()}
        every = {**fields.metrics, **after, "bytes_up": size}
        return Update(torch.stack(rows), fields.steps, every)

    rows = 2 if wire.shares_memory or options.send_gradient else 1
    like = request.start.new_empty(rows, len(request.start))
    buffer = UpdateBuffer(like, wire)
    return Exchange(protocol.TRAIN, round, list(tasks), write, read, buffer, check)
