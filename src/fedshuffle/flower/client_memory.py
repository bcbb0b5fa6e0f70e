"""The vector that a client keeps between rounds, in Flower's context, which lasts for one run.

A reply may get lost after the client has moved on. So the client keeps the vector before its last
round as well, and the server says after which round it last heard from the client.
"""

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from torch import Tensor

from fedshuffle.errors import FedShuffleError

_RECORD = "fedshuffle.state"


class ClientMemory:
    """A client's vectors by the number of rounds after which it had them; zero after none.

    >>> from flwr.app import RecordDict
    >>> memory = ClientMemory(Context(1, 0, {}, RecordDict(), {}), client=0)
    >>> x = torch.zeros(2)
    >>> memory.write({0: memory.read(0, x), 3: torch.ones(2)})
    >>> memory.read(3, x), memory.read(0, x)
    (tensor([1., 1.]), tensor([0., 0.]))
    """

    def __init__(self, context: Context | None, client: int) -> None:
        self._context, self._client = context, client

    def read(self, rounds: int | None, like: Tensor) -> Tensor:
        """The vector after this many rounds."""
        if rounds is None or self._context is None:
            raise FedShuffleError(
                f"client {self._client} keeps a vector between rounds, but has no context to keep"
                " it in. Handle messages by client.handle(message, context)."
            )
        kept = self._context.state.array_records.get(_RECORD, {})
        if rounds == 0:
            return torch.zeros_like(like)
        if str(rounds) not in kept:
            raise FedShuffleError(
                f"client {self._client} has no state after round {rounds}, which the server expects"
                f" (it has those after {', '.join(kept) or 'none'}). Its node was probably"
                " restarted, and what transforms left out until then is lost: start a new run."
            )
        return torch.from_numpy(np.require(kept[str(rounds)].numpy(), requirements="W")).to(like)

    def write(self, vectors: Mapping[int, Tensor]) -> None:
        """Keep these vectors and no others."""
        assert self._context is not None
        record = {str(k): Array(vector.numpy(force=True)) for k, vector in vectors.items() if k}
        self._context.state[_RECORD] = ArrayRecord(record)
