"""Which client is at which node: Flower's node ids are random, client numbers are fixed."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedshuffle._arrays import IntArray
from fedshuffle.errors import FedShuffleError
from fedshuffle.flower import protocol
from fedshuffle.flower.exchange import Node, Outbox, expired
from fedshuffle.flower.protocol import ClientInfo

_log = logging.getLogger("flwr.fedshuffle")

_FEW = 16  # nodes asked at a time where one reply is enough
_PAUSE = 0.5  # seconds between two polls for new nodes
_RETRY = 60.0  # seconds after which a node with an invalid reply is asked again
_SILENT = ("did not say who it is", math.inf)  # asked again, it would hold up the others


@dataclass
class ClientRegistry:
    """The clients that have introduced themselves, and the node of each."""

    grid: Grid
    clients: int
    timeout: float
    """Seconds to wait for an introduction."""
    registered: Mapping[Node, int] | None
    """The client of each node; None for what nodes say of themselves."""

    def __post_init__(self) -> None:
        self.infos: dict[int, ClientInfo] = {}
        """What each client said about itself."""
        self._nodes = {client: node for node, client in (self.registered or {}).items()}
        self._asked = Outbox[tuple[Node, float]](self.grid)
        """The nodes that were asked who they are, each with its deadline."""
        self._refused: dict[Node, tuple[str, float]] = {}
        """Nodes that are no clients: why, and when to ask again."""
        self._foreign: Node | None = None
        """A node that runs another client app; Flower gives all nodes the same."""

    def sizes(self) -> IntArray:
        """The numbers of examples, once every client has introduced itself."""
        sizes = [self.infos[client].size for client in range(self.clients)]
        if None in sizes:
            raise protocol.withheld(sizes.index(None))
        return np.array(sizes)

    def nodes(self, clients: Sequence[int]) -> dict[int, Node | None]:
        """The node of each client; None for one that is not connected. A client that may be at a
        new node, which has not replied yet, has no entry.
        """
        online = self._online()
        if self.registered is None:  # also if all are there, so that nobody joins unnoticed
            self._poll(online)
        found: dict[int, Node | None] = {
            client: node for client in clients if (node := self._nodes.get(client)) in online
        }
        unsure = self.registered is None and self._asked.waiting
        return found if unsure else dict.fromkeys(clients) | found

    def connected(self) -> list[int]:
        """The connected clients, once all new nodes have introduced themselves."""
        self.wait_for_pending()
        online = self._online()
        return sorted(client for client, node in self._nodes.items() if node in online)

    def wait_for_pending(self) -> None:
        """Wait until all connected nodes have introduced themselves, or time is up."""
        if self.registered is None:
            self._poll(self._online())
            while self._asked.waiting:
                time.sleep(_PAUSE)
                self._poll(self._online())

    def wait_for(self, clients: int) -> None:
        """Wait until this many clients have introduced themselves, or time is up."""
        end, shown = time.monotonic() + self.timeout, -1
        while True:
            self._poll(self._online(), _FEW if clients == 1 else None)
            if len(self.infos) >= clients:
                return
            self._check_hopeless(clients)
            if len(self.infos) != shown:
                shown = len(self.infos)
                _log.info("%d of %d clients are connected.", shown, clients)
            if time.monotonic() >= end:
                raise self._too_few(clients, f" within {self.timeout:g} seconds")
            time.sleep(_PAUSE)

    def _check_hopeless(self, wanted: int) -> None:
        """Do not wait where the same client app fails at every node."""
        if self.infos:
            return
        if self._foreign is not None:
            raise FedShuffleError(
                f"the client app at node {self._foreign} is not fedshuffle's, which this strategy"
                " needs: app = fedshuffle.flower.client_app(model=..., data=..., loss=...). To keep"
                " your own train function, use the strategy ConsistentFedAvg."
            )
        failed = [node for node, (_, then) in self._refused.items() if then < math.inf]
        if len(failed) >= self.clients and not self._asked.waiting:
            raise self._too_few(wanted)

    def _online(self) -> set[Node]:
        return set(self.grid.get_node_ids())

    def _poll(self, online: set[Node], most: int | None = None) -> None:
        """Ask unknown nodes (at most ``most`` at a time) who they are, and read the replies so far;
        does not block.
        """
        now, asked = time.monotonic(), self._asked.waiting
        for id in [id for id, (node, _) in asked.items() if node not in online]:
            del asked[id]
        # A node that left and came back may be asked at once.
        self._refused = {
            n: (why, then if n in online else now) for n, (why, then) in self._refused.items()
        }
        known = {self._nodes[client] for client in self.infos} | {n for n, _ in asked.values()}
        unknown = {n for n in online - known if self._refused.get(n, ("", now))[1] <= now}
        room = None if most is None else max(0, most - len(asked))
        queries = [(node, now + self.timeout) for node in sorted(unknown)[:room]]
        for node, _ in self._asked.push(
            queries, lambda to: Message(RecordDict({}), to[0], protocol.INFO, ttl=self.timeout)
        ):
            self._refuse(node, "could not be asked", _RETRY)
        for (node, _), reply in self._asked.pull():
            if expired(reply):
                self._refuse(node, *_SILENT)
            else:
                self._introduce(node, reply, online)
        for id, (node, end) in list(asked.items()):
            if time.monotonic() >= end:
                del asked[id]
                self._refuse(node, *_SILENT)

    def _introduce(self, node: Node, reply: Message, online: set[Node]) -> None:
        if protocol.is_foreign(reply):
            self._foreign = node
        try:
            info = protocol.read(reply, ClientInfo)
            self._check(node, info, online)
        except FedShuffleError as error:
            self._refuse(node, f"failed: {error}", _RETRY)
            return
        if info.client in self.infos:
            _log.info("client %d is back, at node %d.", info.client, node)
        self._nodes[info.client] = node
        self.infos[info.client] = info
        self._refused.pop(node, None)

    def _refuse(self, node: Node, why: str, seconds: float) -> None:
        if self._refused.get(node, ("",))[0] != why:
            _log.warning("node %d is not a client of this run: it %s", node, why)
        self._refused[node] = why, time.monotonic() + seconds

    def _too_few(self, wanted: int, when: str = "") -> FedShuffleError:
        came = f"{len(self.infos)} of {wanted} clients came{when}"
        if self._refused:
            node, (why, _) = next(reversed(self._refused.items()))
            others = f" (as {len(self._refused) - 1} more)" if len(self._refused) > 1 else ""
            return FedShuffleError(f"{came}. Node {node} was refused{others}: it {why}")
        absent = next(c for c in range(self.clients) if c not in self.infos)
        given = "or give the sizes of all clients (sizes=[...]), so that one is enough"
        remedy = "or another" if wanted == 1 else given
        return FedShuffleError(f"{came}; client {absent} is missing. Start it, {remedy}.")

    def _check(self, node: Node, info: ClientInfo, online: set[Node]) -> None:
        says = f"it says that it is client {info.client}"
        if self.registered is not None and self.registered.get(node) != info.client:
            raise FedShuffleError(f"{says}, but is not registered so.")
        if info.client >= self.clients:
            raise FedShuffleError(
                f"{says}, but there are clients 0 to {self.clients - 1} only, and with another the"
                f" objective would change. Start a new run with clients={info.client + 1}, or use"
                " ConsistentFedAvg, which lets clients join."
            )
        if (other := self._nodes.get(info.client, node)) in online - {node}:
            raise FedShuffleError(
                f"{says}, and so does node {other}. Give every node its own partition-id."
            )
        if not info.parameters:
            raise FedShuffleError(f"it says that client {info.client} trains nothing.")
        first = next(iter(self.infos.values()), info)
        for name in ("parameters", "dtype", "frozen", "tied"):
            mine, theirs = getattr(info, name), getattr(first, name)
            if mine != theirs or list(mine) != list(theirs):
                raise FedShuffleError(
                    f"client {info.client} and client {first.client} differ in the {name!r} of"
                    " their models. Build the same model everywhere, with the same frozen values."
                )
        if info.secure_aggregation != first.secure_aggregation:
            raise FedShuffleError(
                f"client {info.client} and client {first.client} do not agree on secure"
                " aggregation. Give client_app(..., secure_aggregation=True) to all or to none."
            )
        before = self.infos.get(info.client, info)
        if before.size != info.size:
            raise FedShuffleError(
                f"client {info.client} came back with {info.size} examples instead of"
                f" {before.size}. Data must stay the same during a run."
            )
