"""Transforms: what happens to one client's update between local training and aggregation."""

from fedshuffle.transforms.base import NO_TRANSFORMS as NO_TRANSFORMS
from fedshuffle.transforms.base import Chain as Chain
from fedshuffle.transforms.base import ClientContext as ClientContext
from fedshuffle.transforms.base import Message as Message
from fedshuffle.transforms.base import ServerContext as ServerContext
from fedshuffle.transforms.base import Transform as Transform
