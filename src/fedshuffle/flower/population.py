r"""The clients that a strategy has seen so far: who they are, and how likely each takes part.

The population need not be known at the start. If probabilities are estimated, client i is among the
replies of a round with

.. math:: p_i = c_i\, \frac{b}{m}\, r_i:

it is connected (estimated from the rounds since it joined), it is one of b that are sampled from
the m connected ones (known), and it replies (estimated from the rounds in which it was asked). If
:math:`r_i` is given, the objective is that of the connected clients, and :math:`c_i` is 1.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedshuffle import fingerprint
from fedshuffle._arrays import FloatArray, IntArray, number
from fedshuffle.errors import FedShuffleError, error_context
from fedshuffle.probabilities import Estimate, Replies
from fedshuffle.probabilities.drift import drift_warning

Node = int
_CONNECTED, _REPLIES = "is connected", "replies"


class Report(NamedTuple):
    """What a client last said of itself."""

    examples: float
    steps: float


class Population:
    """All clients that were ever connected. One that is away keeps its report and its estimates.

    Args:
        estimate: the rule that estimates probabilities; the objective is then that of all clients.
            Without one it is that of the connected clients, who are taken to reply alike.
        forget_after: a client that is away for this many rounds in a row is no longer one.
        given: the probability of each node to reply, if it is known.

    >>> from fedshuffle.probabilities import BetaRate
    >>> population = Population(BetaRate())
    >>> for connected in ([7, 9], [7], [5, 7]):
    ...     population.begin(connected)
    ...     population.asked = connected
    >>> population.size, population.joined, population.inclusion([5, 7]).round(3).tolist()
    (3, [5], [0.667, 0.8])
    """

    def __init__(
        self,
        estimate: Estimate | None,
        forget_after: int | None = None,
        given: Mapping[Node, float] | None = None,
    ) -> None:
        self.estimate, self.forget_after, self.given = estimate, forget_after, given
        for node, r in (given or {}).items():
            if not isinstance(node, int | np.integer):
                raise FedShuffleError(
                    f"response_probability has a key {node!r}: give node ids, whole numbers."
                )
            number(r, f"the response probability of node {node}", within="(0, 1]")
        self.connected: list[Node] = []
        """The nodes that were connected when the round began,"""
        self.joined: list[Node] = []
        """those of them that never were before,"""
        self.forgotten: list[Node] = []
        """those that were away for too long,"""
        self.asked: list[Node] = []
        """and those that were sampled."""
        self.left_out: list[Node] = []
        """Connected nodes without a given probability."""
        self.reports: dict[Node, Report] = {}
        self._number: dict[Node, int] = {}  # in the order of joining; none is used again
        self._numbers_used = self._size_before = 0
        self._past = self._replies()
        self._connected_share = np.ones(0)
        self._changed = False

    def _replies(self) -> dict[str, Replies]:
        """Who was there and who replied so far, if probabilities are estimated from that."""
        if (rule := self.estimate) is None:
            return {}
        return {what: Replies(rule, self._numbers_used) for what in (_CONNECTED, _REPLIES)}

    @property
    def size(self) -> int:
        """The number of clients of the objective."""
        return len(self._number) if self.estimate else len(self.connected)

    @property
    def known(self) -> list[Report]:
        """The reports of the clients of the objective, as far as they have replied before."""
        nodes: Iterable[Node] = self._number if self.estimate else self.connected
        return [self.reports[node] for node in nodes if node in self.reports]

    def begin(self, connected: list[Node]) -> None:
        """Begin a round, in which these nodes are connected.

        That a client is there when it joins says nothing on how often it is: its rounds count from
        the next on.
        """
        if self.given is not None:
            self.left_out = [node for node in connected if node not in self.given]
            if self.left_out and not self.reports:
                raise FedShuffleError(self._says_nothing)
            connected = [node for node in connected if node in self.given]
        self._size_before, known = self.size, self._numbers(self._number)
        there = self._numbers(node for node in connected if node in self._number)
        self.joined = [node for node in connected if node not in self._number]
        self._changed, self.connected = connected != self.connected, connected
        self._number |= {node: self._numbers_used + k for k, node in enumerate(self.joined)}
        self._numbers_used += len(self.joined)
        for past in self._past.values():
            past.grow(self._numbers_used)
        if self._past:
            presence = self._past[_CONNECTED]
            self._connected_share = presence.probabilities(np.arange(self._numbers_used))
            presence.add(known, there)
            self._forget(presence)
            self._changed = bool(self.joined or self.forgotten)

    def _forget(self, presence: Replies) -> None:
        """Forget clients that are away for too long."""
        missed = presence.missed(self._numbers(self._number)).tolist()
        most = math.inf if self.forget_after is None else self.forget_after
        away = zip(self._number, missed, strict=True)
        self.forgotten = [node for node, rounds in away if rounds >= most]
        for past in self._past.values():
            past.forget(self._numbers(self.forgotten))
        for node in self.forgotten:
            del self._number[node]
            self.reports.pop(node, None)

    def inclusion(self, replied: Sequence[Node]) -> FloatArray:
        """The probabilities with which these clients are among the replies of the round."""
        sampled = len(self.asked) / len(self.connected)
        if self.given is not None:
            return sampled * np.array([self.given[node] for node in replied])
        if not self.estimate:
            return np.full(len(replied), len(replied) / len(self.connected))
        numbers = self._numbers(replied)
        found: FloatArray = self._connected_share[numbers] * sampled
        return found * self._past[_REPLIES].probabilities(numbers)

    def end(self, replied: Mapping[Node, Report]) -> None:
        """End a round with the clients that replied."""
        if self._past:
            self._past[_REPLIES].add(self._numbers(self.asked), self._numbers(replied))
        self.reports |= replied

    def _numbers(self, nodes: Iterable[Node]) -> IntArray:
        return np.array([self._number[node] for node in nodes], dtype=np.int64)

    # What there is to say

    def metrics(self) -> dict[str, float | list[int]]:
        """Who is there, who joined, and by how much the weights of the others changed."""
        found: dict[str, float | list[int]] = {
            "clients-known": len(self._number),
            "clients-connected": len(self.connected),
            "joined-nodes": self.joined,
            "forgotten-nodes": self.forgotten,
        }
        if self.estimate and self._size_before:
            found["others-weight"] = self._size_before / self.size
        return {name: value for name, value in found.items() if value != []}

    def change(self) -> str:
        """How the objective changed with the clients of the round, if it did."""
        if not self._changed or not self._size_before:
            return ""
        if not self.estimate:
            return (
                "clients came or went. The objective is now that of the"
                f" {self.size} connected ones; for that of all clients seen so far, use"
                ' response_probability="estimate".'
            )
        sides = {"joined": self.joined, "forgotten": self.forgotten}
        said = [f"nodes {what}: {_some(nodes)}" for what, nodes in sides.items() if nodes]
        return (
            f"{'; '.join(said)}. The objective is now that of {self.size} clients, and the others"
            f" count {self._size_before / self.size:.3g} times what they did. Until it reports its"
            " examples, a client is taken for a mean one."
        )

    @property
    def _says_nothing(self) -> str:
        node, others = self.left_out[0], len(self.left_out) - 1
        return (
            f"response_probability says nothing of node {node} (and {others} more), which is"
            ' connected: add it, or use response_probability="estimate".'
        )

    def warning(self) -> str:
        """What to warn of when a round begins: clients without a probability are not asked; and if
        none of the connected clients was ever seen before, but others were, the same clients may
        have got new ids.
        """
        if self.left_out:
            return f"{self._says_nothing} Until then it is not asked."
        if not self.estimate or not self._size_before or self.joined != self.connected:
            return ""
        return (
            f"none of the {self._size_before} clients seen before is connected. If these are the"
            " same ones, they count as new, and the server's step is too short: node ids last only"
            " with node keys and a database of the SuperLink, and never in Flower's simulator."
            " Then begin without load_state_dict."
        )

    def drift_warnings(self, rounds: int) -> list[str]:
        """A warning where participation drifted, so that there was no single probability."""
        every = [
            drift_warning(
                past.estimate,
                past.drift(),
                f"who {what} changed over the {rounds} rounds",
                "response_probability",
            )
            for what, past in self._past.items()
        ]
        return [said for said in every if said]

    # To continue another time

    def state(self) -> dict[str, Any]:
        """All of it between two rounds, as plain data."""
        return {
            "estimate": self.estimate and fingerprint.part(self.estimate),
            "nodes": [*self._number.items()],
            "numbers_used": self._numbers_used,
            "reports": [[node, *report] for node, report in self.reports.items()],
            "past": {
                what: {name: array.tolist() for name, array in past.state().items()}
                for what, past in self._past.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        if (mine := self.state()["estimate"]) != (begun := state.get("estimate")):
            raise FedShuffleError(
                f"the state is of a strategy with response_probability {begun}, and this one has"
                f" {mine}. Use the same."
            )
        with error_context(
            lambda error: (
                f"this is no state of the strategy ({error!r:.80}): give what state_dict returned."
            ),
            (KeyError, TypeError, ValueError, IndexError),
        ):
            self._number = {int(node): int(number) for node, number in state["nodes"]}
            self._numbers_used = int(state["numbers_used"])
            self.reports = {int(node): Report(*said) for node, *said in state["reports"]}
            self._past = self._replies()
            for what, past in self._past.items():
                past.restore(state["past"][what])


def _some(nodes: list[Node]) -> str:
    return ", ".join(map(str, nodes[:5])) + ", ..." * (len(nodes) > 5)
