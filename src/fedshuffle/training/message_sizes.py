"""The bytes of messages, for clocks with bandwidths, before any message is sent."""

from collections.abc import Sequence

import torch
from torch import nn

from fedshuffle import methods
from fedshuffle.methods import Method
from fedshuffle.randomness import Purpose, generator
from fedshuffle.timing import MessageSizes
from fedshuffle.transforms import Chain, Channel, Transform, channels


def message_sizes(
    model: nn.Module,
    method: str | Method,
    transforms: Sequence[Transform] = (),
    channel: str | Channel | None = None,
) -> MessageSizes:
    """The bytes that a client of a method receives and sends in a round: the model, and one update
    as channels encode it.

    >>> message_sizes(nn.Linear(10, 10), "fedshuffle")
    MessageSizes(down=440.0, up=440.0)
    >>> message_sizes(nn.Linear(10, 10), "fedshuffle", channel="qsgd:4")
    MessageSizes(down=440.0, up=59.0)
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    dtype = trained[0].dtype if trained else torch.float32
    x = torch.ones(sum(p.numel() for p in trained), dtype=dtype)
    direction, up = methods.get(method).direction, x.nbytes
    for one in Chain(channels.with_channel(transforms, channel)).flat:
        up = up if one.numbers_sent is None else one.numbers_sent * x.element_size()
        if isinstance(one, Channel):
            drawn = one.compressor.draw(len(x), generator(0, Purpose.TRANSFORM))
            up = int(one.compressor.compress(x[None], [drawn])[1][0])
    extra = (direction.up - 1) * x.nbytes
    return MessageSizes(float(direction.down * x.nbytes), float(up + extra))
