"""User-level differential privacy: clipping, noise, and what they cost."""

from fedshuffle.privacy.accounting import Budget
from fedshuffle.privacy.adaptive import AdaptiveClip
from fedshuffle.privacy.clipping import Clip
from fedshuffle.privacy.mechanism import Mechanism, bind
from fedshuffle.privacy.noise import GaussianNoise, TreeNoise
from fedshuffle.privacy.settings import AdaptiveClipping, Privacy

__all__ = [
    "AdaptiveClip",
    "AdaptiveClipping",
    "Budget",
    "Clip",
    "GaussianNoise",
    "Mechanism",
    "Privacy",
    "TreeNoise",
    "bind",
]
