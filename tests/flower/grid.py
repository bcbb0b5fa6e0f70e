"""A grid without a network: client apps in this process, with faults on request."""

import time
from collections.abc import Callable, Iterable
from typing import Any, final

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

Fault = Callable[[int, Message], str | None]
"""For a client and a message to it: what goes wrong with it, if anything."""


@final
class LocalGrid(Grid):  # type: ignore[misc]
    """Nodes 100, 101, ... run the client app of partitions 0, 1, ... as soon as they are asked.

    Faults: ``"raises"`` (the app fails), ``"silent"`` (no reply comes, which Flower reports when
    the message expires), ``"gone"`` (the node is lost: an error of Flower's that does not name
    it), ``"lost"`` (the app runs, and its reply is lost like that node), ``"late"`` (its reply
    comes with those to later messages), ``"after:3"`` (it comes when it is asked for the third
    time), ``"refused"`` (the SuperLink does not take the message).
    """

    def __init__(self, apps: list[ClientApp], fault: Fault | None = None) -> None:
        self.apps = apps
        self.fault = fault or (lambda client, message: None)
        self.away: set[int] = set()
        self.contexts: dict[int, Context] = {}
        """What each client keeps during a run."""
        self.asked: list[tuple[int, str]] = []
        self.most_in_hand = 0
        self.received: list[Message] = []
        self.came_late = 0
        self._replies: dict[str, Message] = {}
        self._late: dict[str, Message] = {}
        self._patience: dict[str, int] = {}
        self._silent: dict[str, tuple[float, Message]] = {}
        self._sent = 0

    def get_node_ids(self) -> list[int]:
        return [100 + k for k in range(len(self.apps)) if k not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self._sent += 1
            id = str(self._sent)
            message.metadata.__dict__["_message_id"] = id
            client = message.metadata.dst_node_id - 100
            self.asked.append((client, message.metadata.message_type))
            fault = self.fault(client, message)
            if fault == "silent":
                self._silent[id] = time.monotonic() + message.metadata.ttl, message
            elif fault == "late":
                self._late[id] = self._reply(client, message, None)
            elif fault and fault.startswith("after:"):
                self._replies[id] = self._reply(client, message, None)
                self._patience[id] = int(fault.removeprefix("after:"))
            elif fault != "refused":
                self._replies[id] = self._reply(client, message, fault)
            ids.append("" if fault == "refused" else id)
        return ids

    def _reply(self, client: int, message: Message, fault: str | None) -> Message:
        if fault == "gone":
            return of_superlink(5, "node unavailable", message)
        try:
            if fault == "raises":
                raise RuntimeError("the client failed")
            own = Context(1, client, {"partition-id": client}, RecordDict({}), {})
            context = self.contexts.setdefault(client, own)
            reply = self.apps[client](sent(message), context)
            return of_superlink(5, "node lost", message) if fault == "lost" else reply
        except Exception as error:
            return Message(Error(2, str(error)), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        for id in [id for id in message_ids if id in self._silent]:
            end, message = self._silent[id]
            if time.monotonic() >= end:
                del self._silent[id]
                self._replies[id] = of_superlink(3, "unavailable", message)
        self._patience |= {id: self._patience.get(id, 1) - 1 for id in message_ids}
        ready = [id for id in message_ids if id in self._replies and self._patience[id] <= 0]
        found = [self._replies.pop(id) for id in ready]
        late = [id for id in self._late if id not in message_ids]
        self.came_late += len(late)
        found += [self._late.pop(id) for id in late]
        self.most_in_hand = max(self.most_in_hand, len(found))
        self.received += found
        return found

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))


def of_superlink(code: int, reason: str, message: Message) -> Message:
    """An error of Flower's own: it says to which message it belongs, but not to which node."""
    error = Message(Error(code, reason), reply_to=message)
    error.metadata.__dict__["_src_node_id"] = 1
    return error


def sent(message: Message) -> Message:
    """What arrives: nothing is shared with what was sent, and only bytes travel."""
    content = RecordDict({})
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            record = ArrayRecord(
                {k: Array(a.dtype, a.shape, a.stype, bytes(a.data)) for k, a in record.items()}
            )
        elif isinstance(record, ConfigRecord):
            record = ConfigRecord(dict(record))
        content[name] = record
    copy = Message(content, message.metadata.dst_node_id, message.metadata.message_type, ttl=10.0)
    copy.metadata.__dict__.update(message.metadata.__dict__)
    return copy
