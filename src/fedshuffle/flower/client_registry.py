"""Which client is at which node: Flower's node ids are random, client numbers are fixed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.protocol import ClientInfo
from fedshuffle.flower.transport import Node, batches, expired, push, refuse_errors

_log = logging.getLogger("flwr.fedshuffle")

_FEW = 16
"""Nodes asked at a time where one reply is enough."""
_PAUSE = 0.5
"""Seconds between two polls for new nodes."""
_RETRY = 60.0
"""Seconds after which a node with an invalid reply is asked again."""


class ClientRegistry:
    """The clients that have introduced themselves, and the node of each.

    Args:
        clients: the number of clients.
        timeout: seconds to wait for an introduction.
        registered: the client of each node; by default, what nodes say of themselves.
    """

    def __init__(
        self, clients: int, timeout: float, registered: Mapping[Node, int] | None = None
    ) -> None:
        self.clients = clients
        self.timeout = timeout
        self.registered = registered
        self._nodes = {client: node for node, client in (registered or {}).items()}
        self._infos: dict[int, ClientInfo] = {}
        self._known: set[Node] = set()
        self._asked: dict[str, tuple[Node, float]] = {}
        """By message: the node that was asked for its client, and the deadline."""
        self._not_before: dict[Node, float] = {}
        """When to ask nodes with invalid replies again; those that did not reply, never."""
        self._refused: dict[Node, str] = {}

    @property
    def infos(self) -> Mapping[int, ClientInfo]:
        """What each client said about itself."""
        return self._infos

    def sizes(self) -> IntArray:
        """The numbers of examples, once every client has introduced itself."""
        sizes = [self._infos[client].size for client in range(self.clients)]
        if None in sizes:
            raise FedShuffleError(
                f"client {sizes.index(None)} withholds its size. Let it share it (share_size=True),"
                ' or give the strategy sizes="withheld".'
            )
        return np.array(sizes)

    def nodes(self, grid: Grid, clients: Sequence[int]) -> dict[int, Node | None]:
        """The node of each client; None for one that is not connected. A client that may be at a
        new node, which has not replied yet, has no entry.
        """
        online = set(grid.get_node_ids())
        if self.registered is None and any(self._nodes.get(c) not in online for c in clients):
            self.poll_new_nodes(grid, online)
        found: dict[int, Node | None] = {
            client: node for client in clients if (node := self._nodes.get(client)) in online
        }
        unsure = self.registered is None and self._asked
        return found if unsure else dict.fromkeys(clients) | found

    def connected(self, grid: Grid) -> list[int]:
        """The connected clients, once all new nodes have introduced themselves."""
        self.wait_for_pending(grid)
        online = set(grid.get_node_ids())
        return sorted(client for client, node in self._nodes.items() if node in online)

    def wait_for_pending(self, grid: Grid) -> None:
        """Wait until all connected nodes have introduced themselves, or time is up."""
        if self.registered is None:
            self.poll_new_nodes(grid, set(grid.get_node_ids()))
            while self._asked:
                time.sleep(_PAUSE)
                self.poll_new_nodes(grid, set(grid.get_node_ids()))

    def wait_for(self, grid: Grid, clients: int) -> None:
        """Wait until this many clients have introduced themselves, or time is up."""
        end = time.monotonic() + self.timeout
        shown = -1
        while True:
            self.poll_new_nodes(grid, set(grid.get_node_ids()), _FEW if clients == 1 else None)
            if len(self._infos) >= clients:
                return
            if len(self._infos) != shown:
                shown = len(self._infos)
                _log.info("%d of %d clients are connected.", shown, clients)
            if time.monotonic() >= end:
                raise FedShuffleError(self._why_too_few(clients))
            time.sleep(_PAUSE)

    def poll_new_nodes(self, grid: Grid, online: set[Node], most: int | None = None) -> None:
        """Query unknown nodes (at most ``most`` at a time) and process the replies received so far;
        does not block.
        """
        now = time.monotonic()
        self._not_before = {n: then for n, then in self._not_before.items() if n in online}
        self._asked = {id: asked for id, asked in self._asked.items() if asked[0] in online}
        known = self._known | {node for node, _ in self._asked.values()}
        unknown_nodes = sorted(n for n in online - known if self._not_before.get(n, now) <= now)
        room = None if most is None else max(0, most - len(self._asked))
        for nodes in batches(unknown_nodes[:room]):
            queries = [
                Message(RecordDict({}), node, protocol.INFO, ttl=self.timeout) for node in nodes
            ]
            for node, id in zip(nodes, push(grid, queries), strict=True):
                if id is None:
                    self._refuse(node, "could not be asked", _RETRY)
                else:
                    self._asked[id] = node, now + self.timeout
        for ids in batches(list(self._asked)):
            for reply in grid.pull_messages(ids):
                if reply.metadata.reply_to_message_id in self._asked:
                    node, _ = self._asked.pop(reply.metadata.reply_to_message_id)
                    self._handle_reply(node, reply, online)
        for id, (node, end) in list(self._asked.items()):
            if time.monotonic() >= end:
                del self._asked[id]
                self._refuse(node, "did not say who it is", math.inf)

    def _handle_reply(self, node: Node, reply: Message, online: set[Node]) -> None:
        if expired(reply):  # it would hold up the others again
            self._refuse(node, "did not say who it is", math.inf)
            return
        try:
            refuse_errors(reply)
            info = protocol.read(reply, ClientInfo)
            self._check(node, info, online)
        except FedShuffleError as error:
            self._refuse(node, f"failed: {error}", _RETRY)
        else:
            self._register(node, info)

    def _refuse(self, node: Node, why: str, seconds: float) -> None:
        """Ignore this node for ``seconds``."""
        _log.warning("node %d is not a client of this run: it %s", node, why)
        self._refused[node] = why
        self._not_before[node] = time.monotonic() + seconds

    def _why_too_few(self, wanted: int) -> str:
        came = f"{len(self._infos)} of {wanted} clients came within {self.timeout:g} seconds"
        if self._refused:
            node, why = next(reversed(self._refused.items()))
            others = f" (as {len(self._refused) - 1} more)" if len(self._refused) > 1 else ""
            return f"{came}. Node {node} was refused{others}: it {why}"
        absent = next(c for c in range(self.clients) if c not in self._infos)
        start = f"{came}; client {absent} is missing. Start it"
        if wanted == 1:
            return f"{start}, or another."
        return f"{start}; or give the sizes of all clients (sizes=[...]), so that one is enough."

    def _check(self, node: Node, info: ClientInfo, online: set[Node]) -> None:
        client = info.client
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
        if not info.parameters:
            raise FedShuffleError(f"it says that client {client} trains nothing.")
        first = next(iter(self._infos.values()), info)
        for what, mine, theirs in (
            ("parameters", info.parameters, first.parameters),
            ("kind of numbers", info.dtype, first.dtype),
            ("frozen parts", info.frozen, first.frozen),
            ("shared parameters", info.tied, first.tied),
        ):
            if mine != theirs or list(mine) != list(theirs):
                raise FedShuffleError(
                    f"client {client} and client {first.client} differ in their model's {what}."
                    " Build the same model everywhere, with the same frozen values."
                )
        before = self._infos.get(client)
        if before is not None and before.size != info.size:
            raise FedShuffleError(
                f"client {client} came back with {info.size} examples instead of {before.size}."
                " Data must stay the same during a run."
            )

    def _register(self, node: Node, info: ClientInfo) -> None:
        client = info.client
        if client in self._infos:
            _log.info("client %d is back, at node %d.", client, node)
        self._nodes[client] = node
        self._infos[client] = info
        self._known.add(node)
        self._refused.pop(node, None)
