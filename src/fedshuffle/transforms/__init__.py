"""Transforms: what happens to one client's update between local training and aggregation.

>>> from fedshuffle import transforms
>>> transforms.channel("topk:0.01+ef")
ErrorFeedback(compressor=TopK(share=0.01))
"""

from fedshuffle.transforms.base import NO_TRANSFORMS as NO_TRANSFORMS
from fedshuffle.transforms.base import Chain as Chain
from fedshuffle.transforms.base import ClientContext as ClientContext
from fedshuffle.transforms.base import Message as Message
from fedshuffle.transforms.base import ServerContext as ServerContext
from fedshuffle.transforms.base import Transform as Transform
from fedshuffle.transforms.channels import channel as channel
from fedshuffle.transforms.channels import down_link as down_link
from fedshuffle.transforms.channels import register as register
from fedshuffle.transforms.compression import EF21 as EF21
from fedshuffle.transforms.compression import Channel as Channel
from fedshuffle.transforms.compression import Compressed as Compressed
from fedshuffle.transforms.compression import Diana as Diana
from fedshuffle.transforms.compression import ErrorFeedback as ErrorFeedback
from fedshuffle.transforms.compressor import Compressor as Compressor
from fedshuffle.transforms.down_link import DownLink as DownLink
from fedshuffle.transforms.quantization import QSGD as QSGD
from fedshuffle.transforms.quantization import Float16 as Float16
from fedshuffle.transforms.quantization import Sign as Sign
from fedshuffle.transforms.sparsification import RandK as RandK
from fedshuffle.transforms.sparsification import TopK as TopK
