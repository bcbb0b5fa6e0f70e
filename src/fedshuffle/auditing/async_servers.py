r"""The black-box audit of asynchronous servers: which objective do they minimise?

The clients are ours, the server is theirs. Every client downloads the model, trains, uploads its
update and starts again, with exponential times: the next upload is client i's with probability
:math:`\lambda_i / \sum_j \lambda_j`, whatever happened before. Client i moves along its own
coordinate, so the model shows how far each client has moved it. The mean movement per upload gives
the effective weights, with intervals from the means over batches of successive uploads.

A server that adds each update times :math:`(1 + s)^{-a}`, where s is its staleness, the number of
uploads since the client's download, weights client i by

.. math:: \hat w_i \propto \lambda_i E[(1 + s_i)^{-a}] = \lambda_i \frac{p}{q} Li_a(q),
   \quad p = \lambda_i / \textstyle\sum_j \lambda_j, \quad q = 1 - p.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from fedshuffle._arrays import FloatArray, IntArray, count, expect, number, vector
from fedshuffle.auditing.estimation import (
    BATCHES,
    Observations,
    WeightEstimate,
    estimate_by_batches,
)
from fedshuffle.auditing.findings import CLOSE, Finding, findings_of, uneven
from fedshuffle.auditing.result import Audit, blackbox_result
from fedshuffle.auditing.server_properties import ServerProperties, describe_weights
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.federation import Federation
from fedshuffle.randomness import Purpose, check_seed, generator

_SMALL = 2.0**-10  # the size of a client's own update beside the common one, if not linear
_LONGEST_BUFFER = 4096  # uploads after which a server should have moved
_SHOWN = 4  # staleness up to which weights are reported
_SETTLE = 4  # batches of uploads before those that are measured
_ROUNDING = 1e-12  # relative to what an upload moves
_SURE = 5.0  # standard errors needed to say that updates are lost
_GROWN = 1e3  # times as far as the first update from all uploads together: the model diverges


class AsyncServer(Protocol):
    """A server under audit, at first with a model of zero.

    Clients download before they upload, so the server can remember which model each started from.
    """

    def download(self, client: int, /) -> ArrayLike:
        """The current model, from which this client starts: one number per parameter."""
        ...

    def upload(self, client: int, update: FloatArray, /) -> Any:
        """Receive how far this client moved from the model that it downloaded last."""
        ...


MakeServer = Callable[[int], AsyncServer]
"""What makes a fresh server when called with the number of parameters, such as a class."""


def audit_async_server(
    make: MakeServer,
    federation: Federation,
    rates: ArrayLike,
    *,
    uploads: int = 20_000,
    seed: int = 0,
    confidence: float = 0.95,
    name: str | None = None,
) -> Audit:
    """The objective that an asynchronous server really minimises, measured by known updates.

    All clients do the same work. The weights are those of small steps: where the model hardly moves
    between download and upload.

    Args:
        make: a class, or a function, that makes a fresh server from the number of parameters. A
            server has ``download(client) -> model`` and ``upload(client, update)``.
        federation: the clients, and the objective that is meant.
        rates: how many times each client uploads per unit of time, in the mean.
        uploads: how many to simulate.
        seed: of the order in which clients upload.
        confidence: of each client's interval.
        name: of the server.

    >>> class FedAsync:
    ...     def __init__(self, parameters):
    ...         self.model, self.version, self.started = np.zeros(parameters), 0, {}
    ...     def download(self, client):
    ...         self.started[client] = self.version
    ...         return self.model
    ...     def upload(self, client, update):
    ...         staleness = self.version - self.started[client]
    ...         self.model = self.model + update / (1 + staleness) ** 0.5
    ...         self.version += 1
    >>> clients = Federation.from_sizes([1, 1, 1, 1])
    >>> result = audit_async_server(FedAsync, clients, rates=[4, 2, 1, 0.5])
    >>> result.effective_weights.round(2).tolist(), result.consistent
    ([0.62, 0.25, 0.1, 0.04], False)
    """
    expect(federation, Federation, "federation")
    number(confidence, "confidence", within="(0, 1)")
    n = len(federation)
    rates = vector(rates, "rates", range(n))
    share = rates / rates.sum()
    if count(uploads, "uploads") < 2 * BATCHES:
        least = 2 * BATCHES
        raise FedShuffleError(f"{uploads} uploads are too few to judge by: use {least} or more.")
    rng = generator(check_seed(seed), Purpose.MONTE_CARLO)
    server = _Server(make, n, name or getattr(make, "__name__", None) or type(make).__name__)
    buffer, each = server.buffer(), uploads // BATCHES
    properties = _check(server, rng.choice(n, 64 + 8 * buffer, p=share), rng)
    response = _Response(server, buffer) if properties.linear and n > 1 else None
    if response is not None:
        response.check_mixing()
        properties = response.describe(properties, federation, share)
    order = rng.choice(n, (_SETTLE + BATCHES, each), p=share)
    estimate = _simulate(server, buffer, order, properties.linear is not False, share)
    result = blackbox_result(
        estimate,
        dataclasses.replace(properties, rounds=each * BATCHES),
        federation,
        confidence,
        probabilities=share,
        steps=None,
        name=server.name,
        source="each starts again when it has uploaded",
        how=f"{each * BATCHES} uploads" + (f", {buffer} for each model" if buffer > 1 else ""),
        notes=() if response is None else (response.note,),
    )
    if response is None:
        return result
    return dataclasses.replace(result, findings=(*result.findings, *response.findings(result)))


def staleness_weights(make: MakeServer, clients: int = 4) -> FloatArray:
    """The weights with which an update of staleness 0, 1, 2, ... enters the model.

    Staleness counts the models that the server made between a client's download and its upload.

    >>> class Mixing:
    ...     def __init__(self, parameters):
    ...         self.model, self.start = np.zeros(parameters), {}
    ...     def download(self, client):
    ...         self.start[client] = self.model
    ...         return self.model
    ...     def upload(self, client, update):
    ...         self.model = 0.5 * self.model + 0.5 * (self.start[client] + update)
    >>> staleness_weights(Mixing).tolist()
    [0.5, 0.5, 0.5, 0.5, 0.5]
    """
    server = _Server(make, count(clients, "clients", least=2), "the server")
    return _Response(server, server.buffer()).stale


@dataclasses.dataclass(frozen=True)
class _Server:
    """A server, and clients that download again as soon as they have uploaded."""

    make: MakeServer
    clients: int
    name: str

    def models(self, uploads: Iterable[tuple[int, FloatArray]]) -> Iterator[FloatArray]:
        """The models of a fresh server after each of these uploads."""
        size = self.clients + 1
        with error_context(f"{self.name} failed"):
            server = self.make(size)
            for client in range(self.clients):
                server.download(client)
        for done, (client, update) in enumerate(uploads, 1):
            with error_context(f"{self.name} failed at upload {done}, of client {client}"):
                server.upload(client, update.copy())
                model = np.array(server.download(client), dtype=np.float64)
            if model.shape != (size,):
                raise FedShuffleError(
                    f"{self.name} gives a model of shape {model.shape}: make one with the number of"
                    f" parameters that it is given, here {size}."
                )
            if not np.isfinite(model).all():
                raise self.diverges(done)
            yield model

    def after(self, *uploads: tuple[int, FloatArray]) -> FloatArray:
        """The model of a fresh server after these uploads."""
        *_, model = self.models(uploads)
        return model

    def diverges(self, uploads: int) -> FedShuffleError:
        return FedShuffleError(
            f"{self.name} diverges: {uploads} uploads of bounded updates blow its model up. Let the"
            " weights of models that are mixed sum to one at most."
        )

    def along(self, client: int) -> FloatArray:
        """An update of length one along the client's own coordinate; the last one is unused."""
        unit = self.zero
        unit[client] = 1.0
        return unit

    @property
    def zero(self) -> FloatArray:
        return np.zeros(self.clients + 1)

    def buffer(self) -> int:
        """The number of uploads after which the server makes a new model."""
        for done, model in enumerate(self.models([(0, self.along(0))] * _LONGEST_BUFFER), 1):
            if model.any():
                return done
        raise FedShuffleError(f"{self.name} has not moved after {_LONGEST_BUFFER} uploads.")


class _Response:
    """How the models of a linear server follow single updates."""

    def __init__(self, server: _Server, buffer: int) -> None:
        n, rest, self._name = server.clients, server.zero, server.name
        one, wait = (0, server.along(0)), (1, rest)
        weights = [
            server.after(*[wait] * (buffer * s), one, *[wait] * (buffer - 1))[0]
            for s in range(_SHOWN + 1)
        ]
        self.stale = np.array(weights)  # by staleness
        moved, back = (
            server.after(*[(1, server.along(1))] * buffer, *[(0, rest)] * more)[1]
            for more in (0, buffer)
        )
        # The share of what others did that a client takes back by uploading what it has got.
        self.undone = 1 - back / moved if moved else 0.0
        uploads = [
            (client, update)
            for client in range(n)
            for update in [*[rest] * buffer, server.along(client), *[rest] * (buffer - 1)]
        ]
        ends = itertools.islice(server.models(uploads), 2 * buffer - 1, None, 2 * buffer)
        self.fresh = np.array([model[client] for client, model in enumerate(ends)])  # by client

    def check_mixing(self) -> None:
        """Refuse a server whose model is that of one client: each would train by itself."""
        if np.allclose([*self.stale / self.stale[0], self.undone], 1.0, rtol=CLOSE):
            raise FedShuffleError(
                f"{self._name} replaces its model by the one that arrives, so clients train apart"
                " and minimise nothing together. Mix less than all of it, or add the update."
            )

    @property
    def note(self) -> str:
        """The staleness weights as a fact."""
        weights = ", ".join(f"{weight:.3g}" for weight in self.stale)
        return f"an update of staleness 0, 1, 2, ... enters the model with weight {weights}, ..."

    def describe(
        self, properties: ServerProperties, federation: Federation, share: FloatArray
    ) -> ServerProperties:
        """The properties with the rule by which fresh updates are weighted."""
        once = np.zeros(len(share), dtype=np.int64)
        seen = Observations(1, once, np.arange(len(share)), self.fresh, self.fresh, once + 1)
        form = describe_weights(properties, federation, share, seen).form
        return dataclasses.replace(properties, form=form)

    def findings(self, result: Audit) -> list[Finding]:
        """What makes clients of different speed count differently."""
        share, stale = result.inclusion_probabilities, self.stale / self.stale[0]
        by_rate = "inclusion probability" in (result.properties.form or "")
        biased, falls = result.consistent is False, stale[1] < 1 - CLOSE
        once = share * self.fresh / (share @ self.fresh)  # if every update counts once
        expected = np.where(once == 0, 1e-300, once)
        apart = result.effective_weights - expected
        errors = 0.0 if result.standard_errors is None else result.standard_errors
        lost = bool((np.abs(apart) > _SURE * errors + CLOSE * expected).any())
        fast, slow = int(share.argmax()), int(share.argmin())
        least = int((apart / expected).argmin())
        ids = result.client_ids
        return findings_of(
            {
                "rates": biased and uneven(share) and not by_rate,
                "staleness": biased and falls,
                "lost": biased and lost and not falls,
                "undone": abs(self.undone) > CLOSE,
            },
            fast=ids[fast],
            slow=ids[slow],
            often=share[fast] / share[slow],
            one=stale[1],
            last=stale[-1],
            staleness=len(stale) - 1,
            client=ids[least],
            ratio=1 + apart[least] / expected[least],
            undone=self.undone,
        )


def _check(server: _Server, order: IntArray, rng: np.random.Generator) -> ServerProperties:
    """Whether the server repeats itself, drifts, and is linear in the updates."""
    one, other = rng.normal(size=(2, server.clients, server.clients + 1))

    def after(updates: FloatArray) -> FloatArray:
        return server.after(*((client, updates[client]) for client in order.tolist()))

    def same(a: FloatArray, b: FloatArray) -> bool:
        return bool(np.abs(a - b).max() <= 10 * CLOSE * max(np.abs(a).max(), np.abs(b).max()))

    first, still = after(one), after(np.zeros_like(one))
    if not same(first, after(one)):
        return ServerProperties(repeatable=False)
    moves = bool(np.abs(still).max() > CLOSE * np.abs(first).max())
    linear = same(after(one + other) - still, first - still + after(other) - still)
    return ServerProperties(linear=linear, repeatable=True, moves_without_updates=moves)


def _simulate(
    server: _Server, buffer: int, order: IntArray, linear: bool, share: FloatArray
) -> WeightEstimate:
    """The weights from the mean moves along each client's coordinate in batches of uploads.

    Shares of uploads are known, so only what varies beyond them adds noise.
    """
    n, each = server.clients, order.shape[1]
    common, own = (0.0, 1.0) if linear else (1.0, _SMALL)
    updates = common + own * np.eye(n, n + 1)
    uploads = ((client, updates[client]) for client in order.ravel().tolist())
    ends = [*itertools.islice(server.models(uploads), each - 1, None, each)]
    first = np.abs(server.after(*[(0, updates[0])] * buffer)).max()
    if np.abs(ends[-1]).max() > _GROWN * order.size * first:
        raise server.diverges(order.size)
    moves = np.diff(ends, axis=0)[_SETTLE - 1 :] / (own * each)
    moves = moves[:, :n] - moves[:, n:]  # without what is common to all clients
    counts = np.stack([np.bincount(batch, minlength=n) for batch in order[_SETTLE:]])
    seen = counts.sum(axis=0)
    per_upload = moves.sum(axis=0) * each / np.maximum(seen, 1)
    beyond = moves - per_upload * counts / each
    beyond[np.abs(beyond) <= _ROUNDING * np.abs(per_upload)] = 0.0
    return estimate_by_batches(share * per_upload + beyond, seen)
