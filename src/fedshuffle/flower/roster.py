"""Who is who: Flower's nodes have random numbers, and our clients fixed ones."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import messages
from fedshuffle.flower.exchange import Node, ask
from fedshuffle.flower.messages import Hello

_log = logging.getLogger("flwr.fedshuffle")

_A_FEW = 16
"""So many nodes are asked at a time where one that answers is enough."""
_AGAIN = 60.0
"""Seconds after which a node is asked again that gave no good answer."""


@final
class Roster:
    """The clients that have introduced themselves, and at which node each is.

    Args:
        clients: how many there are in all.
        timeout: seconds to wait for an introduction.
        registered: which client each node is; by default nodes are believed what they say.
    """

    def __init__(
        self, clients: int, timeout: float, registered: Mapping[Node, int] | None = None
    ) -> None:
        self.clients = clients
        self.timeout = timeout
        self.registered = registered
        self._nodes = {client: node for node, client in (registered or {}).items()}
        self._hellos: dict[int, Hello] = {}
        self._met: set[Node] = set()
        self._not_before: dict[Node, float] = {}
        """When to ask nodes again that gave no good answer; those that gave none, never."""

    @property
    def hellos(self) -> Mapping[int, Hello]:
        """What each client said of itself."""
        return self._hellos

    def sizes(self) -> IntArray:
        """The numbers of examples, once every client has introduced itself."""
        for client in range(self.clients):
            if self._hellos[client].size is None:
                raise FedShuffleError(
                    f"client {client} withholds its size. Let it share it (share_size=True), or"
                    ' give the strategy sizes="withheld".'
                )
        return np.array([self._hellos[client].size for client in range(self.clients)])

    def nodes(self, grid: Grid, clients: Sequence[int]) -> dict[int, Node | None]:
        """Where clients are; None for those that are not connected. If one is not where it was,
        and is not registered, those who came since are asked who they are.
        """
        online = set(grid.get_node_ids())
        gone = any(self._nodes.get(client) not in online for client in clients)
        if gone and self.registered is None:
            self.meet(grid, online)
        known = {client: self._nodes.get(client) for client in clients}
        return {client: node if node in online else None for client, node in known.items()}

    def wait_for(self, grid: Grid, clients: int) -> None:
        """Wait until so many clients have introduced themselves, or time is up."""
        end = time.monotonic() + self.timeout
        shown = -1
        while True:
            self.meet(grid, set(grid.get_node_ids()), clients)
            if len(self._hellos) >= clients:
                return
            if len(self._hellos) != shown:
                shown = len(self._hellos)
                _log.info("%d of %d clients are here.", shown, clients)
            if time.monotonic() >= end:
                absent = next(c for c in range(self.clients) if c not in self._hellos)
                raise FedShuffleError(
                    f"{shown} of {clients} clients came within {self.timeout:g} seconds; client"
                    f" {absent} is missing. Start it; or give the sizes of all clients"
                    " (sizes=[...]), so that one of them is enough to begin."
                )
            time.sleep(1.0)

    def meet(self, grid: Grid, online: set[Node], enough: int | None = None) -> None:
        """Ask those nodes who they are that are not known yet, until so many clients are."""
        self._not_before = {n: then for n, then in self._not_before.items() if n in online}
        now = time.monotonic()
        strangers = sorted(n for n in online - self._met if self._not_before.get(n, now) <= now)
        if enough == 1:
            strangers = strangers[:_A_FEW]
        wanted = self.clients if enough is None else enough

        def write(who: int, node: Node, ttl: float) -> Message:
            return Message(RecordDict({}), node, messages.HELLO, ttl=ttl)

        def read(node: Node, reply: Message) -> Hello:
            hello = messages.read(reply, Hello)
            self._check(node, hello, online)
            return hello

        missing = ask(
            grid,
            strangers,
            lambda some: {n: n for n in some},
            write,
            read,
            self._enter,
            timeout=self.timeout,
            enough=lambda: len(self._met & online) >= wanted,
        )
        for node, why in missing.items():
            _log.warning("node %d is no client of this run: it %s", node, why)
            silent = why.startswith("did not answer")  # it would hold up the others again
            self._not_before[node] = math.inf if silent else time.monotonic() + _AGAIN

    def _check(self, node: Node, hello: Hello, online: set[Node]) -> None:
        client = hello.client
        if self.registered is not None and self.registered.get(node) != client:
            raise FedShuffleError(f"it says that it is client {client}, but is not registered so.")
        if client >= self.clients:
            raise FedShuffleError(
                f"it says that it is client {client}, but there are clients 0 to"
                f" {self.clients - 1} only. Give the strategy the right number of clients."
            )
        if self._nodes.get(client, node) in online - {node}:
            raise FedShuffleError(
                f"it says that it is client {client}, and so does node {self._nodes[client]}."
                " Give every node its own partition-id."
            )
        if not hello.parameters:
            raise FedShuffleError(f"it says that client {client} trains nothing.")
        first = next(iter(self._hellos.values()), hello)
        for what, mine, theirs in (
            ("parameters", hello.parameters, first.parameters),
            ("kind of numbers", hello.dtype, first.dtype),
            ("frozen parts", hello.frozen, first.frozen),
            ("shared parameters", hello.tied, first.tied),
        ):
            if mine != theirs or list(mine) != list(theirs):
                raise FedShuffleError(
                    f"client {client} and client {first.client} differ in their model's {what}."
                    " Build the same model everywhere, with the same frozen values."
                )
        before = self._hellos.get(client)
        if before is not None and before.size != hello.size:
            raise FedShuffleError(
                f"client {client} came back with {hello.size} examples instead of {before.size}."
                " Data must stay the same during a run."
            )

    def _enter(self, node: Node, hello: Hello) -> None:
        client = hello.client
        if client in self._hellos:
            _log.info("client %d is back, at node %d.", client, node)
        self._nodes[client] = node
        self._hellos[client] = hello
        self._met.add(node)
