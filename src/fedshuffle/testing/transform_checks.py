"""Whether a transform does what it states, the same for every engine."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedshuffle import engines
from fedshuffle._arrays import FloatArray, IntArray
from fedshuffle.engines import ReferenceEngine
from fedshuffle.methods import get
from fedshuffle.testing.problems import (
    DoesNotApplyError,
    ensure,
    equal,
    numbers,
    partial_sampling,
    regression,
)
from fedshuffle.training.rounds import Run, simulate
from fedshuffle.transforms import ClientContext, Message, ServerContext, Transform

_D = 6
_ROUNDS = 400
_SIGMAS = 5.0


def rows(transform: Transform) -> None:
    """Many clients at once are the same clients one by one, to the last digits."""
    together = _sent(transform, range(4))
    for k in range(4):
        alone = _sent(transform, [k])
        equal(alone.values[0], together.values[k], 1e-12, f"the message of row {k} alone")
        if together.state is not None and alone.state is not None:
            equal(alone.state[0], together.state[k], 1e-12, f"the state of row {k} alone")
        for name, values in alone.metrics.items():
            equal(values[0], together.metrics[name][k], 1e-9, f"the {name} of row {k} alone")


def shapes(transform: Transform) -> None:
    """Messages and states are like the updates, in single and double precision, and every metric
    is one finite number per client; state is kept only if ``keeps_state`` says so.
    """
    for dtype in (torch.float32, torch.float64):
        found = _sent(transform, range(3), dtype=dtype)
        like = (3, _D), dtype
        ensure((tuple(found.values.shape), found.values.dtype) == like, f"messages not as {like}.")
        kept = found.state is not None
        ensure(kept == transform.keeps_state, f"keeps_state = {transform.keeps_state}: not so.")
        if found.state is not None:
            same = (tuple(found.state.shape), found.state.dtype) == like
            ensure(same, f"states: expected {like}, found {tuple(found.state.shape)}.")
        for name, values in found.metrics.items():
            ensure(np.shape(values) == (3,), f"metric {name}: expected one number per client.")
            finite = np.isfinite(np.asarray(values)).all()
            ensure(finite, f"metric {name}: expected finite numbers, found {values}.")
        still = _sent(transform, range(3), torch.zeros(3, _D, dtype=dtype), dtype=dtype)
        ensure(bool(still.values.isfinite().all()), "an update of zero: the message is not finite.")


def purity(transform: Transform) -> None:
    """The same seed, round and client give the same message and state, and so does the server; the
    state that was given is not overwritten.
    """
    state = _state(transform, 3, torch.float64)
    before = None if state is None else state.clone()
    first, again = (_sent(transform, range(3), state=state) for _ in range(2))
    equal(again.values, first.values, 0.0, "the message, a second time")
    for name, values in first.metrics.items():
        equal(again.metrics[name], values, 0.0, f"the {name}, a second time")
    if state is not None and before is not None:
        equal(state, before, 0.0, "the state that was given, afterwards")
        if first.state is not None and again.state is not None:
            equal(again.state, first.state, 0.0, "the state, a second time")
    update, given = numbers(_D), _server_state(transform)
    kept = {name: tensor.clone() for name, tensor in given.items()}
    context = _server_context(transform, given)
    (one, after), (two, again_after) = (transform.server(update.clone(), context) for _ in range(2))
    equal(two, one, 0.0, "the server's part, a second time")
    for name, tensor in after.items():
        equal(again_after[name], tensor, 0.0, f"the server's {name}, a second time")
    for name, tensor in kept.items():
        equal(given[name], tensor, 0.0, f"the server's {name} that was given, afterwards")


def layout(transform: Transform) -> None:
    """With ``any_layout`` the coordinates in another order give the same message in that order."""
    if not transform.any_layout or transform.keeps_state:  # state has a layout
        raise DoesNotApplyError("it does not state any_layout.")
    order, updates = torch.tensor([3, 0, 5, 1, 4, 2]), numbers(3, _D)
    plain = _sent(transform, range(3), updates)
    other = _sent(transform, range(3), updates[:, order])
    equal(other.values, plain.values[:, order], 1e-12, "the message in another order")


def mean(transform: Transform) -> None:
    """What it states of the mean: messages equal the updates (unchanged), on average over rounds
    (unbiased), or the mean of all messages so far comes closer to a constant update (restored).
    And so does the server's part with the sum, where nothing is restored.
    """
    updates = numbers(3, _D)
    if transform.mean == "unchanged":
        equal(_sent(transform, range(3), updates).values, updates, 0.0, "messages, not updates")
        equal(_at_server(transform, updates[0], 1)[0], updates[0], 0.0, "the sum at the server")
        return
    if transform.mean not in ("unbiased", "restored"):
        raise DoesNotApplyError(f"it states that its mean is {transform.mean}.")
    state, found = _state(transform, 3, torch.float64, zero=True), list[Tensor]()
    for round in range(_ROUNDS):
        message = _sent(transform, range(3), updates, round=round, state=state)
        state = message.state
        found.append(message.values)
    sums = torch.stack(found).cumsum(0)
    off = sums[-1] / _ROUNDS - updates
    if transform.mean == "restored":  # what is owed stays bounded
        most = 16 * float((sums[0] - updates).abs().max()) + 32 * float(updates.abs().max())
        owed = float(off.abs().max()) * _ROUNDS
        ensure(
            owed <= most,
            f"messages over {_ROUNDS} rounds: expected {most:g} missing at most, found {owed:g}:"
            " the memory does not make good for it.",
        )
        return
    _ensure_mean(torch.stack(found), updates, "message")
    _ensure_mean(_at_server(transform, updates[0], _ROUNDS), updates[0], "sum at the server")


def _ensure_mean(found: Tensor, wanted: Tensor, what: str) -> None:
    """The mean over the first axis is what it should be, up to its standard error."""
    off, error = found.mean(dim=0) - wanted, found.std(dim=0) / len(found) ** 0.5
    far = off.abs() > _SIGMAS * error + 1e-9
    ensure(
        not far.any(), f"the mean {what} over {len(found)} rounds is off by {off[far].tolist()}."
    )


def _at_server(transform: Transform, update: Tensor, rounds: int) -> Tensor:
    """What the server makes of the same sum in some rounds, a row each."""
    context, found = _server_context(transform, {}), list[Tensor]()
    for round in range(rounds):
        after, state = transform.server(update.clone(), replace(context, round=round))
        found.append(after)
        context = replace(context, state=state)
    return torch.stack(found)


def agreement(transform: Transform) -> None:
    """On every engine of one worker, on threads and on processes: the same trajectory."""
    method = get("fedshuffle")
    problem, clients = regression(method)
    run = Run(clients, method, partial_sampling(method), step_size=0.05, transforms=[transform])
    *_, (want,) = simulate(ReferenceEngine(problem), [run], 4)
    for name in ("sequential", "vectorized", "sequential:2", "sequential:2:processes"):
        engine = engines.make(name, problem)
        try:
            *_, (found,) = simulate(engine, [run], 4)
        finally:
            engine.close()
        equal(found.x, want.x, 1e-9, f"the model on {name}, against the reference engine's")
        for metric, values in want.metrics.items():
            equal(found.metrics[metric], values, 1e-6, f"{metric} on {name}, against the reference")


def _sent(
    transform: Transform,
    clients: "range | list[int]",
    updates: Tensor | None = None,
    round: int = 3,
    state: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    shared: Mapping[str, Tensor] | None = None,
) -> Message:
    """What some clients send for their updates."""
    chosen: IntArray = np.array(list(clients))
    given = numbers(4, _D)[chosen] if updates is None else updates
    ones: FloatArray = np.ones(len(chosen))
    context = ClientContext(
        seed=7,
        round=round,
        clients=chosen,
        steps=np.full(len(chosen), 3),
        step_sizes=0.1 * ones,
        weights=0.5 * ones,
        shared=_server_state(transform) if shared is None else shared,
        full_gradients=lambda: numbers(4, _D, seed=5)[chosen].to(dtype),
    )
    if state is None:
        state = _state(transform, 4, dtype)
        state = None if state is None else state[chosen]
    return transform.client(given.to(dtype).clone(), state, context)


def _state(transform: Transform, n: int, dtype: torch.dtype, zero: bool = False) -> Tensor | None:
    if not transform.keeps_state:
        return None
    return (0.0 if zero else 0.3) * numbers(n, _D, seed=2).to(dtype)


def _server_state(transform: Transform) -> Mapping[str, Tensor]:
    """The server's state after a first round, so that there is one if it keeps any."""
    return transform.server(numbers(_D, seed=4), _server_context(transform, {}))[1]


def _server_context(transform: Transform, state: Mapping[str, Tensor]) -> ServerContext:
    sent = _sent(transform, range(4), shared={}).metrics
    metrics = {name: np.asarray(values) for name, values in sent.items()}
    return ServerContext(seed=7, round=1, state=state, metrics=metrics)


CHECKS: dict[str, Callable[[Transform], None]] = {
    "rows": rows,
    "shapes": shapes,
    "purity": purity,
    "layout": layout,
    "mean": mean,
    "engines": agreement,
}
