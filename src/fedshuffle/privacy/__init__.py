"""User-level differential privacy: clipping, noise, and what they cost."""

from fedshuffle.privacy.accounting import Budget as Budget
from fedshuffle.privacy.adaptive import AdaptiveClip as AdaptiveClip
from fedshuffle.privacy.clipping import Clip as Clip
from fedshuffle.privacy.mechanism import Mechanism as Mechanism
from fedshuffle.privacy.mechanism import bind as bind
from fedshuffle.privacy.noise import GaussianNoise as GaussianNoise
from fedshuffle.privacy.noise import TreeNoise as TreeNoise
from fedshuffle.privacy.settings import AdaptiveClipping as AdaptiveClipping
from fedshuffle.privacy.settings import Privacy as Privacy
