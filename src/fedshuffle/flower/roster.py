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
from fedshuffle.flower.exchange import Node, expired, pieces, push, refuse_errors
from fedshuffle.flower.messages import Hello

_log = logging.getLogger("flwr.fedshuffle")

_A_FEW = 16
"""So many nodes are asked at a time where one that answers is enough."""
_PAUSE = 0.5
"""Seconds between two looks for newcomers."""
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
        self._asked: dict[str, tuple[Node, float]] = {}
        """Who was asked who it is, by message, and until when it may answer."""
        self._not_before: dict[Node, float] = {}
        """When to ask nodes again that gave no good answer; those that gave none, never."""
        self._refused: dict[Node, str] = {}

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
        and is not registered, those who came since are asked who they are; until all have
        answered, nothing is said of it.
        """
        online = set(grid.get_node_ids())
        if self.registered is None and any(self._nodes.get(c) not in online for c in clients):
            self.meet(grid, online)
        there = {client: self._nodes.get(client) for client in clients}
        found: dict[int, Node | None] = {c: node for c, node in there.items() if node in online}
        unsure = self.registered is None and self._asked
        return found if unsure else dict.fromkeys(clients) | found

    def connected(self, grid: Grid) -> list[int]:
        """The clients that are there, once those who came since have said who they are."""
        self.settle(grid)
        online = set(grid.get_node_ids())
        return sorted(client for client, node in self._nodes.items() if node in online)

    def settle(self, grid: Grid) -> None:
        """Wait until all who are there have said who they are, or have not in time."""
        if self.registered is None:
            self.meet(grid, set(grid.get_node_ids()))
            while self._asked:
                time.sleep(_PAUSE)
                self.meet(grid, set(grid.get_node_ids()))

    def wait_for(self, grid: Grid, clients: int) -> None:
        """Wait until so many clients have introduced themselves, or time is up."""
        end = time.monotonic() + self.timeout
        shown = -1
        while True:
            self.meet(grid, set(grid.get_node_ids()), _A_FEW if clients == 1 else None)
            if len(self._hellos) >= clients:
                return
            if len(self._hellos) != shown:
                shown = len(self._hellos)
                _log.info("%d of %d clients are here.", shown, clients)
            if time.monotonic() >= end:
                raise FedShuffleError(self._too_few(clients))
            time.sleep(_PAUSE)

    def meet(self, grid: Grid, online: set[Node], most: int | None = None) -> None:
        """Ask nodes who they are that are not known yet, at most so many at a time, and take what
        answers there are; this waits for none.
        """
        now = time.monotonic()
        self._not_before = {n: then for n, then in self._not_before.items() if n in online}
        self._asked = {id: asked for id, asked in self._asked.items() if asked[0] in online}
        known = self._met | {node for node, _ in self._asked.values()}
        strangers = sorted(n for n in online - known if self._not_before.get(n, now) <= now)
        room = None if most is None else max(0, most - len(self._asked))
        for some in pieces(strangers[:room]):
            notes = [
                Message(RecordDict({}), node, messages.HELLO, ttl=self.timeout) for node in some
            ]
            for node, id in zip(some, push(grid, notes), strict=True):
                if id is None:
                    self._refuse(node, "could not be asked", _AGAIN)
                else:
                    self._asked[id] = node, now + self.timeout
        for ids in pieces(list(self._asked)):
            for reply in grid.pull_messages(ids):
                if reply.metadata.reply_to_message_id in self._asked:
                    node, _ = self._asked.pop(reply.metadata.reply_to_message_id)
                    self._hear(node, reply, online)
        for id, (node, end) in list(self._asked.items()):
            if time.monotonic() >= end:
                del self._asked[id]
                self._refuse(node, "did not say who it is", math.inf)

    def _hear(self, node: Node, reply: Message, online: set[Node]) -> None:
        if expired(reply):  # it would hold up the others again
            self._refuse(node, "did not say who it is", math.inf)
            return
        try:
            refuse_errors(reply)
            hello = messages.read(reply, Hello)
            self._check(node, hello, online)
        except FedShuffleError as error:
            self._refuse(node, f"failed: {error}", _AGAIN)
        else:
            self._enter(node, hello)

    def _refuse(self, node: Node, why: str, seconds: float) -> None:
        """No client of this run, at least for so many seconds."""
        _log.warning("node %d is no client of this run: it %s", node, why)
        self._refused[node] = why
        self._not_before[node] = time.monotonic() + seconds

    def _too_few(self, wanted: int) -> str:
        came = f"{len(self._hellos)} of {wanted} clients came within {self.timeout:g} seconds"
        if self._refused:
            node, why = next(reversed(self._refused.items()))
            others = f" (as {len(self._refused) - 1} more)" if len(self._refused) > 1 else ""
            return f"{came}. Node {node} was refused{others}: it {why}"
        absent = next(c for c in range(self.clients) if c not in self._hellos)
        start = f"{came}; client {absent} is missing. Start it"
        if wanted == 1:
            return f"{start}, or another."
        return f"{start}; or give the sizes of all clients (sizes=[...]), so that one is enough."

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
        self._refused.pop(node, None)
