"""How the time of a task varies: a random factor with mean one, drawn for every task."""

import abc
from dataclasses import dataclass

import numpy as np

from fedshuffle._arrays import FloatArray, number, shortest
from fedshuffle.errors import FedShuffleError, check_known


class Jitter(abc.ABC):
    """A positive random factor with mean one.

    >>> Exponential().quantile(np.array([0.5])).round(3).tolist()
    [0.693]
    """

    @abc.abstractmethod
    def quantile(self, u: FloatArray) -> FloatArray:
        """The factor that a uniform number from [0, 1) stands for."""

    @abc.abstractmethod
    def cdf(self, factor: FloatArray) -> FloatArray:
        """The probability of a factor to be at most this."""

    @abc.abstractmethod
    def density(self, factor: FloatArray) -> FloatArray:
        """The derivative of that: the density at a factor."""


@dataclass(frozen=True)
class NoJitter(Jitter):
    """Every task of a client takes equally long.

    >>> NoJitter().cdf(np.array([0.5, 1.0])).tolist()
    [0.0, 1.0]
    """

    def __str__(self) -> str:
        return "none"

    def quantile(self, u: FloatArray) -> FloatArray:
        return np.ones_like(u)

    def cdf(self, factor: FloatArray) -> FloatArray:
        return (np.asarray(factor) >= 1).astype(np.float64)

    def density(self, factor: FloatArray) -> FloatArray:
        raise FedShuffleError("a factor that is always 1 has no density.")


@dataclass(frozen=True)
class Exponential(Jitter):
    r"""Memoryless: :math:`P(J \le t) = 1 - e^{-t}`.

    >>> Exponential().cdf(np.array([1.0])).round(3).tolist()
    [0.632]
    """

    def __str__(self) -> str:
        return "exponential"

    def quantile(self, u: FloatArray) -> FloatArray:
        return -np.log1p(-u)

    def cdf(self, factor: FloatArray) -> FloatArray:
        return -np.expm1(-np.maximum(factor, 0.0))

    def density(self, factor: FloatArray) -> FloatArray:
        return np.exp(-factor)


@dataclass(frozen=True)
class LogNormal(Jitter):
    r"""The logarithm is normal with standard deviation ``sigma``, at most 4:
    :math:`J = e^{\sigma z - \sigma^2 / 2}`. Beyond, the mean is made by tasks that hardly
    ever come.

        >>> LogNormal(1.0).cdf(np.array([1.0])).round(3).tolist()
        [0.691]
    """

    sigma: float

    def __post_init__(self) -> None:
        number(self.sigma, "the sigma of a log-normal jitter", within="(0, 4]")

    def __str__(self) -> str:
        return f"lognormal:{shortest(self.sigma)}"

    def quantile(self, u: FloatArray) -> FloatArray:
        from scipy import special  # slow to import: only when needed

        # Not 0: a task of no length would never be behind another.
        z = special.ndtri(np.maximum(u, 2.0**-54))
        return np.asarray(np.exp(self.sigma * z - self.sigma**2 / 2))

    def cdf(self, factor: FloatArray) -> FloatArray:
        from scipy import special

        with np.errstate(divide="ignore"):
            z = (np.log(np.maximum(factor, 0.0)) + self.sigma**2 / 2) / self.sigma
        return np.asarray(special.ndtr(z))

    def density(self, factor: FloatArray) -> FloatArray:
        x = np.maximum(factor, 1e-300)
        z = (np.log(x) + self.sigma**2 / 2) / self.sigma
        return np.asarray(np.exp(-(z**2) / 2) / (x * self.sigma * np.sqrt(2 * np.pi)))


def parse(text: str) -> Jitter:
    """The jitter that a text names.

    >>> parse("lognormal:0.5"), parse("exponential")
    (LogNormal(sigma=0.5), Exponential())
    """
    name, colon, value = text.strip().partition(":")
    check_known("jitter", name, ("none", "exponential", "lognormal"))
    if bool(colon) != (name == "lognormal"):
        raise FedShuffleError(
            f"jitter {text!r} cannot be read: write none, exponential or lognormal:SIGMA."
        )
    if name == "lognormal":
        return LogNormal(number(value, "the sigma of a log-normal jitter"))
    return NoJitter() if name == "none" else Exponential()
