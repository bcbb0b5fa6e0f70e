"""Transforms: what happens to one client's update between local training and aggregation.

>>> from fedshuffle import transforms
>>> transforms.channel("topk:0.01+ef")
ErrorFeedback(compressor=TopK(share=0.01))
"""

from fedshuffle.transforms.base import (
    NO_TRANSFORMS,
    Chain,
    ClientContext,
    Message,
    ServerContext,
    Transform,
)
from fedshuffle.transforms.channels import channel, down_link, register
from fedshuffle.transforms.compression import EF21, Channel, Compressed, Diana, ErrorFeedback
from fedshuffle.transforms.compressor import Compressor
from fedshuffle.transforms.down_link import DownLink
from fedshuffle.transforms.quantization import QSGD, Float16, Sign
from fedshuffle.transforms.sparsification import RandK, TopK

__all__ = [
    "EF21",
    "NO_TRANSFORMS",
    "QSGD",
    "Chain",
    "Channel",
    "ClientContext",
    "Compressed",
    "Compressor",
    "Diana",
    "DownLink",
    "ErrorFeedback",
    "Float16",
    "Message",
    "RandK",
    "ServerContext",
    "Sign",
    "TopK",
    "Transform",
    "channel",
    "down_link",
    "register",
]
