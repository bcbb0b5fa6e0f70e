"""Inclusion probabilities that nobody knows, estimated from who took part so far.

A rule is an object (:class:`TruncatedIntervals`, ...) or the text that names one, which
:func:`parse` reads:

===========================  =====================================================================
``estimate``                 the rule that served best, which is ``estimate:bayes``
``estimate:bayes``           the share of rounds with the client, from a prior that is the mean of
                             all clients; ``estimate:bayes:1,4`` has the prior Beta(1, 4)
``estimate:fedau:50``        FedAU: the mean interval between participations, cut at 50 rounds
``estimate:ewma:0.05``       a moving rate, in which the newest round has a share of 0.05
===========================  =====================================================================
"""

from collections.abc import Callable

from fedshuffle._arrays import expect, number
from fedshuffle.errors import FedShuffleError, check_known
from fedshuffle.probabilities.estimates import BetaRate, Estimate, MovingRate, TruncatedIntervals
from fedshuffle.probabilities.participation import Participation
from fedshuffle.probabilities.replies import Replies

__all__ = [
    "BetaRate",
    "Estimate",
    "MovingRate",
    "Participation",
    "Replies",
    "TruncatedIntervals",
    "parse",
    "resolve",
]


def parse(text: str) -> Estimate:
    """The rule that a text names.

    >>> parse("estimate:fedau:50"), parse("estimate")
    (TruncatedIntervals(cutoff=50), BetaRate(a=1.0, b=None))
    """
    first, _, rest = text.strip().partition(":")
    if first != "estimate":
        raise FedShuffleError(
            f"probabilities {text!r} cannot be read: write 'estimate', 'estimate:fedau:50',"
            " 'estimate:ewma:0.05' or 'estimate:bayes', or leave them out if they are known."
        )
    name, colon, argument = rest.partition(":")
    check_known("estimate of probabilities", name or "bayes", _RULES)
    form, make = _RULES[name or "bayes"]
    try:
        return make(*argument.split(",")) if colon else make()
    except FedShuffleError:
        raise
    except (ValueError, TypeError) as error:
        raise FedShuffleError(f"probabilities {text!r} cannot be read: write {form!r}.") from error


def resolve(probabilities: str | Estimate) -> Estimate:
    """A rule, given as text or as it is.

    >>> resolve(MovingRate(0.1))
    MovingRate(share=0.1)
    """
    if isinstance(probabilities, str):
        return parse(probabilities)
    expect(probabilities, Estimate, "probabilities")
    return probabilities


def _beta(a: str = "1", b: str | None = None) -> BetaRate:
    what = "a parameter of the Beta prior"
    return BetaRate(number(a, what), None if b is None else number(b, what))


_RULES: dict[str, tuple[str, Callable[..., Estimate]]] = {
    "fedau": ("estimate:fedau:50", lambda cutoff="50": TruncatedIntervals(int(cutoff))),
    "ewma": ("estimate:ewma:0.05", lambda share="0.05": MovingRate(number(share, "the share"))),
    "bayes": ("estimate:bayes:1,4", _beta),
}
