r"""Down-link compression: clients follow the server's model by compressed corrections.

The server has the model :math:`x`; clients know :math:`\hat x`, from which they train. In every
round the server sends

.. math:: \hat x \leftarrow \hat x + c \, Q(x - \hat x), \qquad
          x \leftarrow x + \sum_{i \in S} a_i (y_i - \hat x),

with a compressor :math:`Q` and :math:`c` as for error feedback (EF21-P, Gruntkowska et al. 2023).
What a message leaves out stays in :math:`x - \hat x`, and so is part of the next one.

All clients need all messages. One that was away receives those it missed, or the whole
:math:`\hat x` if that is smaller; one that was never there receives the whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.randomness import Purpose, generator
from fedshuffle.transforms.compressor import Compressor, Drawn
from fedshuffle.transforms.wire import Arrays

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DownLink:
    """Sends the model to clients by compressed corrections.

    The state holds ``known``, the model that clients know; ``sent``, the bytes of all messages so
    far; and ``received`` of each client, the value of ``sent`` when it was last there, or -1.

    >>> import torch
    >>> from fedshuffle.transforms import TopK
    >>> link, x = DownLink(TopK(0.5)), torch.zeros(4)
    >>> state = link.init(x, clients=3)
    >>> known, bytes_down, state = link.send(x, state, np.array([0, 1]), seed=0, round=0)
    >>> bytes_down
    array([16., 16.])
    >>> x = x + torch.tensor([3.0, 1.0, 2.0, 0.0])
    >>> known, bytes_down, state = link.send(x, state, np.array([1, 2]), seed=0, round=1)
    >>> known, bytes_down
    (tensor([3., 0., 2., 0.]), array([ 9., 16.]))
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        expect(self.compressor, Compressor, "the compressor of the down-link")

    def __str__(self) -> str:
        return str(self.compressor)

    def init(self, x: "Tensor", clients: int) -> "dict[str, Tensor]":
        """The state before the first round."""
        import torch

        return {
            "known": x.clone(),
            "sent": torch.zeros((), dtype=torch.int64),
            "received": torch.full((clients,), -1, dtype=torch.int64),
        }

    def send(
        self, x: "Tensor", state: "Mapping[str, Tensor]", clients: IntArray, seed: int, round: int
    ) -> "tuple[Tensor, FloatArray, dict[str, Tensor]]":
        """The model that the clients of a round train from, the bytes that each of them receives,
        and the next state.
        """
        import torch

        known = state["known"]
        drawn = self._draw(len(x), seed, round)
        correction, size = self.compressor.compress((x - known)[None], [drawn])
        known = known + self.compressor.damping(len(x)) * correction[0]
        sent = state["sent"] + int(size[0])
        members = torch.from_numpy(clients).to(state["received"].device)
        whole = x.numel() * x.element_size()
        last = state["received"][members]
        missed = (sent - last).where(last >= 0, whole).clamp_max(whole)
        received = state["received"].index_fill(0, members, int(sent))
        after = {"known": known, "sent": sent, "received": received}
        return known, missed.cpu().numpy().astype(np.float64), after

    def encode(self, x: "Tensor", known: "Tensor", seed: int, round: int) -> Arrays:
        """The arrays of a round's message."""
        return self.compressor.encode(x - known, self._draw(len(x), seed, round))

    def decode(self, arrays: Arrays, known: "Tensor", seed: int, round: int) -> "Tensor":
        """The model that a client knows after a round's message."""
        drawn = self._draw(len(known), seed, round)
        correction = self.compressor.decode(arrays, len(known), known.dtype, drawn)
        return known + self.compressor.damping(len(known)) * correction.to(known.device)

    def _draw(self, d: int, seed: int, round: int) -> Drawn:
        return self.compressor.draw(d, generator(seed, Purpose.DOWN_LINK, round=round))
